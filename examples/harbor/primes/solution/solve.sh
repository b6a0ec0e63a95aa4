#!/bin/sh
awk 'BEGIN {
    for (number = 2; number < 50; number++) {
        for (factor = 2; factor < number && number % factor; factor++) {}
        if (factor == number) print number
    }
}' > primes.txt
