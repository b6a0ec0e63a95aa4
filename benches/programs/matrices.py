"""Nested lists: matrix products, a transpose and a determinant."""


def product(a, b):
    columns = list(zip(*b))
    return [[sum(x * y for x, y in zip(row, column)) for column in columns] for row in a]


def determinant(matrix, modulus):
    matrix = [list(row) for row in matrix]
    size = len(matrix)
    result = 1
    for i in range(size):
        pivot = next((row for row in range(i, size) if matrix[row][i] % modulus), None)
        if pivot is None:
            return 0
        if pivot != i:
            matrix[i], matrix[pivot] = matrix[pivot], matrix[i]
            result = -result
        result = result * matrix[i][i] % modulus
        inverse = pow(matrix[i][i], modulus - 2, modulus)
        for row in range(i + 1, size):
            factor = matrix[row][i] * inverse % modulus
            for column in range(i, size):
                matrix[row][column] = (matrix[row][column] - factor * matrix[i][column]) % modulus
    return result % modulus


def run(size):
    a = [[(i * 17 + j * j * 31 + i * j) % 101 for j in range(size)] for i in range(size)]
    b = [[(i * i * 13 + j * 7 + 5) % 97 for j in range(size)] for i in range(size)]
    c = product(product(a, b), a)
    shifted = [
        [x + (i * i * j * 31 + i * 7919 + j * j * 977) % 613 for j, x in enumerate(row)]
        for i, row in enumerate(c)
    ]
    return sum(map(sum, c)), determinant(shifted, 1_000_000_007)


print(*run(150))
