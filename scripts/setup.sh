#!/usr/bin/env bash
# setup.sh - installs the Debian or Ubuntu packages named as arguments that are missing, by apt-get (as root, else with sudo);
# without arguments those that building and running the CPU program needs. Says nothing when all are there; elsewhere it names
# what is missing and ends with exit code 1.
# usage: scripts/setup.sh [package...]
set -euo pipefail

[ $# -gt 0 ] || set -- gcc libc6-dev make libpcre2-dev libdnnl-dev

# What can be seen without a package manager is: a compiler built by hand or another distribution's headers will do.
present() {
    case $1 in
        gcc | g++ | make | clang | git | shellcheck) command -v "$1" > /dev/null ;;
        libopenmpi-dev) command -v mpicc > /dev/null ;;
        gnuplot*) command -v gnuplot > /dev/null ;;
        iproute2) command -v tc > /dev/null ;;
        bible-kjv) command -v bible > /dev/null || [ -x /usr/games/bible ] ;;
        procps) command -v pgrep > /dev/null ;;
        openmpi-bin) command -v mpirun > /dev/null ;;
        libc6-dev) [ -e /usr/include/stdio.h ] ;;
        libpcre2-dev) [ -e /usr/include/pcre2.h ] || [ -e /usr/local/include/pcre2.h ] ;;
        libdnnl-dev) [ -n "$(find /usr/lib /usr/lib64 /usr/local/lib -name 'libdnnl.so*' -print -quit 2> /dev/null)" ] ;;
        *) dpkg-query -W -f '${db:Status-Status}\n' "$1" 2> /dev/null | grep -qx installed ;;
    esac
}

missing=()
for package in "$@"; do
    present "$package" || missing+=("$package")
done
[ ${#missing[@]} -gt 0 ] || exit 0

fail() {
    echo "error: $*" >&2
    exit 1
}

command -v apt-get > /dev/null ||
    fail "needed but not found (Debian's names): ${missing[*]}; install them with this system's package manager"
root=()
if [ "$(id -u)" -ne 0 ]; then
    command -v sudo > /dev/null || fail "not root and no sudo; run as root: apt-get install ${missing[*]}"
    root=(sudo)
    [ -t 0 ] || root=(sudo -n)
fi
echo "installing with apt-get: ${missing[*]}" >&2
log=$(mktemp)
trap 'rm -f "$log"' EXIT
apt() { "${root[@]}" env DEBIAN_FRONTEND=noninteractive apt-get -q -y -o DPkg::Lock::Timeout=300 "$@" > "$log" 2>&1 < /dev/null; }

apt update || tail -n 3 "$log" >&2 # one unreachable source need not matter
if ! apt install --no-install-recommends "${missing[@]}"; then
    tail -n 15 "$log" >&2
    fail "apt-get could not install ${missing[*]}"
fi
