"""Classes: slots, operators, inheritance, properties and super."""


class Vector:
    __slots__ = ("x", "y")

    def __init__(self, x, y):
        self.x = x
        self.y = y

    def __add__(self, other):
        return Vector(self.x + other.x, self.y + other.y)

    def dot(self, other):
        return self.x * other.x + self.y * other.y


class Counter:
    def __init__(self):
        self.total = 0
        self.items = []

    def hit(self, k):
        self.total += k
        return self.total

    @property
    def size(self):
        return len(self.items)


class Sparse(Counter):
    def hit(self, k):
        if k % 1000 == 0:
            self.items.append(k)
        return super().hit(k) + self.size


def run(count):
    where = Vector(0, 0)
    step = Vector(1, 2)
    counter = Sparse()
    total = 0
    for i in range(count):
        where = where + step
        total += where.dot(step)
        counter.hit(i)
    return total, counter.total, counter.size


print(*run(800_000))
