#!/bin/sh
# Chromium and its driver for the tests of pages: the user's own if they are on PATH, else Debian's.
set -eu
cd "$(dirname "$0")/.."
part=browser
. setup/common.sh

if command -v chromedriver && { command -v chromium || command -v google-chrome || command -v chrome; }; then exit 0; fi >/dev/null
may_install || fail "install Chromium or Chrome, with chromedriver, first"
apt chromium chromium-driver
