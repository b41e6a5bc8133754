"""How often a player can win tic-tac-toe against random moves, averaged over both sides.

    python benchmarks/tic_tac_toe.py

Probabilities are exact, by a search of all games. A board is a tuple of 9 squares: 0 is empty, 1
and 2 are the players'.
"""

from collections.abc import Callable, Sequence
from functools import cache

LINES = ((0, 1, 2), (3, 4, 5), (6, 7, 8), (0, 3, 6), (1, 4, 7), (2, 5, 8), (0, 4, 8), (2, 4, 6))

Board = tuple[int, ...]
# Which of these moves a player considers on a board.
Choose = Callable[[Board, int, Sequence[int]], Sequence[int]]
# Combines the probabilities that the considered moves win.
Tie = Callable[[Sequence[float]], float]


def move(board: Board, square: int, player: int) -> Board:
    return (*board[:square], player, *board[square + 1 :])


def has_won(board: Board, player: int) -> bool:
    return any(all(board[i] == player for i in line) for line in LINES)


def empty(board: Board) -> list[int]:
    return [i for i in range(9) if not board[i]]


@cache
def outcome(board: Board, player: int) -> int:
    """1, 0 or -1 for the player to move, if both play perfectly."""
    if has_won(board, 3 - player):
        return -1
    return max((-outcome(move(board, i, player), 3 - player) for i in empty(board)), default=0)


def any_move(board: Board, player: int, moves: Sequence[int]) -> Sequence[int]:
    return moves


def perfect(board: Board, player: int, moves: Sequence[int]) -> Sequence[int]:
    """The moves that are best against an opponent who plays perfectly."""
    best = outcome(board, player)
    return [i for i in moves if -outcome(move(board, i, player), 3 - player) == best]


def mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)


def wins(choose: Choose, tie: Tie, player: int) -> float:
    """The share of games that ``player`` (1 begins) wins against random moves."""

    @cache
    def value(board: Board, mover: int) -> float:
        if has_won(board, 3 - mover):
            return float(mover != player)
        moves = empty(board)
        if not moves:
            return 0.0
        considered = choose(board, mover, moves) if mover == player else moves
        values = [value(move(board, i, mover), 3 - mover) for i in considered]
        return tie(values) if mover == player else mean(values)

    return value((0,) * 9, 1)


def main() -> None:
    players: dict[str, tuple[Choose, Tie]] = {
        "the best answer to random moves": (any_move, max),
        "perfect, and of equal moves the best against random ones": (perfect, max),
        "perfect, and of equal moves any": (perfect, mean),
    }
    for name, (choose, tie) in players.items():
        first, second = wins(choose, tie, 1), wins(choose, tie, 2)
        both = mean([first, second])
        print(f"{name}: wins {first:.2%} as first, {second:.2%} as second, {both:.2%}")


if __name__ == "__main__":
    main()
