#!/bin/sh
printf 'apples\nbread\nmilk\ntea\n' > /tmp/expected
if cmp -s /tmp/expected /workspace/sorted.txt; then reward=1; else reward=0; fi
echo "$reward" > /logs/verifier/reward.txt
