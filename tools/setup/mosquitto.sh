#!/bin/sh
# Have mosquitto, the MQTT broker, on this machine: tests, demo and benchmarks start their own instances of it.
set -eu
PATH=$PATH:/usr/sbin:/usr/local/sbin
if command -v mosquitto >/dev/null 2>&1; then
    exit 0
fi
if ! command -v apt-get >/dev/null 2>&1; then
    echo "mosquitto is missing and there is no apt here: install mosquitto 2.x with your system's package manager and try again." >&2
    exit 1
fi
if [ "$(id -u)" != 0 ]; then
    echo "mosquitto is missing and installing it needs root: run 'sudo apt-get install mosquitto' and try again." >&2
    exit 1
fi
echo "installing mosquitto" >&2
apt-get update -qq
DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends mosquitto >/dev/null
