"""Dataclasses: making, comparing, replacing and hashing records."""

from dataclasses import dataclass, field, replace


@dataclass(frozen=True, order=True)
class Point:
    x: int
    y: int


@dataclass
class Order:
    number: int
    price: float
    tags: list = field(default_factory=list)

    def total(self):
        return self.number * self.price


def run(count):
    points = [Point(i * 37 % 1009, i) for i in range(count)]
    points.sort()
    unique = {replace(point, y=point.y % 10) for point in points[::2]}
    orders = [Order(i % 17, 0.5) for i in range(count)]
    for order in orders[::3]:
        order.tags.append(order.number)
    worth = sum(order.total() for order in orders)
    return points[count // 2].y, len(unique), worth, sum(len(order.tags) for order in orders)


print(*run(95_000))
