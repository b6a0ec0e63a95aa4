"""Exceptions: raising, catching by class, finally and unwinding through calls."""


class Rejected(ValueError):
    def __init__(self, number):
        super().__init__(number)
        self.number = number


def check(number):
    if number % 5 == 0:
        raise Rejected(number)
    if number % 7 == 0:
        raise KeyError(number)
    return number


def descend(depth, number):
    if depth:
        return descend(depth - 1, number)
    return check(number)


def run(count):
    kept = rejected = missing = closed = 0
    for number in range(count):
        try:
            kept += descend(3, number)
        except Rejected as error:
            rejected += error.number
        except LookupError as error:
            missing += error.args[0]
        finally:
            closed += 1
    return kept, rejected, missing, closed


print(*run(800_000))
