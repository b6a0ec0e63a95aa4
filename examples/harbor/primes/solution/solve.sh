#!/bin/sh
for number in $(seq 2 49); do
    factors=$(factor "$number" | wc -w)
    [ "$factors" -eq 2 ] && echo "$number"
done > primes.txt
