#!/bin/sh
# Have ffmpeg and arecord on this machine: cameras and microphones are read with them, and their tests run the real ones.
set -eu
missing=
command -v ffmpeg >/dev/null 2>&1 || missing="ffmpeg"
command -v arecord >/dev/null 2>&1 || missing="$missing alsa-utils"
[ -n "$missing" ] || exit 0
# Nothing but the sources for cameras and microphones needs them: without them, their tests are skipped and say so.
without() {
    echo "$1; tests of cameras and microphones are skipped. As root: apt-get install $missing" >&2
    exit 0
}
command -v apt-get >/dev/null 2>&1 || without "$missing missing, and no apt here"
[ "$(id -u)" = 0 ] || without "$missing missing, and installing needs root"
echo "installing $missing" >&2
export DEBIAN_FRONTEND=noninteractive
# shellcheck disable=SC2086 - one word a package
apt-get update -qq && apt-get install -y -qq --no-install-recommends $missing >/dev/null || without "apt-get failed"
