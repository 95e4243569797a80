"""A calculator as a tool: exact arithmetic of numbers, + - * / ** and brackets, and nothing else."""

import ast
import operator

BINARY = {ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul, ast.Div: operator.truediv}
LARGEST = 1e15  # of a result in between, so that no power takes long


def compute(node: ast.AST) -> float:
    """Compute a parsed expression. Raises ValueError for anything but arithmetic of numbers below LARGEST."""
    match node:
        case ast.Expression(body):
            return compute(body)
        case ast.Constant(int() | float() as number) if not isinstance(number, bool):
            value = number
        case ast.UnaryOp(ast.USub(), operand):
            value = -compute(operand)
        case ast.BinOp(left, ast.Pow(), ast.Constant(int() as power)) if 0 <= power <= 9:
            value = compute(left) ** power
        case ast.BinOp(left, sign, right) if type(sign) in BINARY:
            value = BINARY[type(sign)](compute(left), compute(right))
        case _:
            raise ValueError("only numbers, + - * / and brackets, and ** with a power from 0 to 9")
    if abs(value) > LARGEST:
        raise ValueError(f"a number beyond {LARGEST:g}")
    return value


def calculate(expression: str) -> str:
    """Compute an arithmetic expression such as (12 + 7.5) * 4."""
    value = compute(ast.parse(expression.replace(",", ""), mode="eval"))
    return f"{value:.12g}"


def tools() -> list:
    return [calculate]
