def add(a, b):
    return a + b


assert add(1, 2) == 3
assert add(-1, 1) == 0
assert [add(i, i) for i in range(50)][-1] == 98
