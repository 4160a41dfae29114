#!/bin/sh
# An ssh server for the tests of `build --on ssh://…`, which run one of their own on a port of their own. For machines that only
# run tests: it is installed without starting the system's. Without it those tests skip and say so.
set -eu
PATH="$PATH:/usr/sbin:/usr/local/sbin"
command -v sshd > /dev/null 2>&1 && command -v scp > /dev/null 2>&1 && exit 0
if [ "$(id -u)" != 0 ] || ! command -v apt-get > /dev/null 2>&1; then
    echo "no ssh server here, and it cannot be installed: the tests that need one skip" >&2
    exit 0
fi
export DEBIAN_FRONTEND=noninteractive RUNLEVEL=1
apt-get update -qq && apt-get install -y -qq --no-install-recommends openssh-server openssh-client > /dev/null ||
    echo "openssh-server cannot be installed: the tests that need an ssh server skip" >&2
