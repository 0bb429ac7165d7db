"""Many calls as one: what a framework's `vmap` makes of a function that has a batch axis, or queries that can be more.

Which way there is goes by the declaration alone; how arrays are seen with other axes is a framework's own.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from .call import results_of
from .declaration import Arrays, Batching, Declaration, Facts, Options


@dataclass(frozen=True, slots=True)
class Mapped:
    """A call that is mapped over an axis.

    Attributes:
        declaration: of the function.
        options: its options.
        size: extent of the mapped axis.
        arrays: its arrays; in those that are mapped the axis is in front.
        axes: for each of them, whether it is mapped.
        label: the label of an array's dtype.
        spread: makes an array of one that is not mapped, with the mapped axis in front.
        run: the function of arrays and options, as results in order.
    """

    declaration: Declaration
    options: Options
    size: int
    arrays: Mapping[str, Any]
    axes: Mapping[str, bool]
    label: Callable[[str, Any], str]
    spread: Callable[[Any, int], Any]
    run: Callable[[Mapping[str, Any], Options], Sequence[Any]]

    def as_one(self) -> tuple[Any, ...] | None:
        """Results with the mapped axis in front, by one call; None where that takes one call after the other."""
        batching = self.declaration.batching
        if batching is None:
            return None
        facts = self.facts()
        if batching.unless is not None and batching.unless(facts):
            return None
        asked = results_of(self.declaration, facts, self.options)
        if any(self.axes.get(name) for name in batching.never) or set(asked) & set(batching.never_results):
            return None
        has_batch = len(facts[batching.teller].shape) > batching.rank
        if all(self.axes[name] for name in batching.required):
            if has_batch and batching.options:
                return None
            return self._by_batch_axis(batching, has_batch)
        folds = batching.foldable is not None and not any(self.options[name] for name in batching.foldable)
        if folds and not has_batch and not any(self.axes[name] for name in batching.required):
            return self._by_further_queries(batching)
        return None

    def facts(self) -> Arrays:
        """The arrays of one of the calls."""
        shapes = {n: array.shape[1:] if self.axes[n] else array.shape for n, array in self.arrays.items()}
        return {n: Facts(tuple(shapes[n]), self.label(n, array)) for n, array in self.arrays.items()}

    def _by_batch_axis(self, batching: Batching, has_batch: bool) -> tuple[Any, ...]:
        arrays = {n: a if n in batching.never else self._spread(n, a) for n, a in self.arrays.items()}
        if has_batch:
            arrays = {n: a if n in batching.never else _merged(a) for n, a in arrays.items()}
        results = self.run(arrays, {**self.options, **batching.options})
        return self._parted(results, batching) if has_batch else tuple(results)

    def _by_further_queries(self, batching: Batching) -> tuple[Any, ...]:
        whole = (*batching.required, *batching.never)
        arrays = {n: a if n in whole else _merged(self._spread(n, a)) for n, a in self.arrays.items()}
        return self._parted(self.run(arrays, self.options), batching)

    def _spread(self, name: str, array: Any) -> Any:
        """The array with the mapped axis in front, whether it has it yet or not."""
        return array if self.axes[name] else self.spread(array, self.size)

    def _parted(self, results: Sequence[Any], batching: Batching) -> tuple[Any, ...]:
        """Results of merged arrays with the mapped axis on its own again."""
        inner = self.arrays[batching.teller].shape[int(self.axes[batching.teller])]
        return tuple(result.reshape(self.size, inner, *result.shape[1:]) for result in results)


def _merged(array: Any) -> Any:
    """The first two axes as one."""
    return array.reshape(array.shape[0] * array.shape[1], *array.shape[2:])
