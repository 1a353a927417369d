#!/usr/bin/env bash
# Debian's Chromium and a font, for tests/monitor/test_browser.py.
set -euo pipefail
wanted=(chromium fonts-dejavu-core)
apt-get install -y -qq --no-install-recommends "${wanted[@]}" >/dev/null 2>&1 && exit
apt-get update -qq >&2
apt-get install -y -qq --no-install-recommends "${wanted[@]}" >/dev/null
