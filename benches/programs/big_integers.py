"""Integers beyond a machine word: products, powers, division and digits."""


def run(terms, rounds):
    factorial = 1
    for i in range(2, terms):
        factorial *= i
    low, high = 0, 1
    for _ in range(terms * 12):
        low, high = high, low + high
    prime = 2**521 - 1
    total = 0
    for i in range(1, rounds):
        total = (total + pow(3, prime - i, prime)) % prime
    digits = str(factorial % 10**1200)
    return sum(map(int, digits)), low % 1_000_007, total % 1_000_007, factorial // high % 997


print(*run(3_000, 900))
