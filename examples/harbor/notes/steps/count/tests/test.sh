#!/bin/sh
if [ "$(tr -d ' \n' < /workspace/count.txt 2>/dev/null)" = 4 ]; then reward=1; else reward=0; fi
echo "$reward" > /logs/verifier/reward.txt
