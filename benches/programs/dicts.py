"""Containers: dicts, lists, sets, comprehensions and a sieve."""


def run(count):
    seen = {}
    for i in range(count):
        key = (i * 7919) % 5003
        seen[key] = seen.get(key, 0) + 1
    evens = [x * 2 for x in range(count)]
    thirds = set(evens[::3])
    words = {}
    for word in ("the quick brown fox jumps over the lazy dog " * 4000).split():
        words[word] = words.get(word, 0) + 1
    sieve = bytearray([1]) * count
    for i in range(2, int(count**0.5) + 1):
        if sieve[i]:
            for j in range(i * i, count, i):
                sieve[j] = 0
    common = len(thirds & set(evens[::5]))
    return len(seen), len(thirds), words["the"], sum(sieve), common


print(*run(1_800_000))
