#!/bin/sh
# The share of the lines that are right, in their order; further lines are wrong.
awk 'BEGIN { count = split("2 3 5 7 11 13 17 19 23 29 31 37 41 43 47", expected, " ") }
    $0 == expected[NR] { right++ }
    END { printf "{\"reward\": %.3f}\n", (NR > count) ? 0 : right / count }
' /workspace/primes.txt > /tmp/reward.json 2>/dev/null || echo '{"reward": 0}' > /tmp/reward.json
mv /tmp/reward.json /logs/verifier/reward.json
