"""Encoded examples on disk: drawn once, and read by every run that needs them."""

import os
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import overload

import numpy as np
import pyarrow as pa

from metatokens.errors import UserError, one_line
from metatokens.tasks.example import Encoded

_SCHEMA = pa.schema({"input_ids": pa.list_(pa.int32()), "answer_start": pa.int32()})


class ExampleStore(Sequence[Encoded]):
    """The examples of a file that `ExampleStore.write` wrote, memory-mapped."""

    def __init__(self, path: Path):
        try:
            batch = pa.ipc.open_file(pa.memory_map(str(path))).get_batch(0)
            batch.validate(full=True)
            if batch.schema != _SCHEMA or any(column.null_count for column in batch.columns):
                raise pa.ArrowInvalid(f"its columns are {batch.schema}")
            ids = batch["input_ids"]
            self._ids = ids.values.to_numpy()
            self._offsets = ids.offsets.to_numpy()
            self._answer_starts = batch["answer_start"].to_numpy()
            lengths = np.diff(self._offsets)
            if ((self._answer_starts < 0) | (self._answer_starts > lengths)).any():
                raise pa.ArrowInvalid("an answer starts outside its example")
        except (OSError, LookupError, pa.ArrowException) as error:
            raise UserError(f"{path} is no file of encoded examples: {one_line(error)}.") from error

    @classmethod
    def write(cls, path: Path, examples: Iterable[Encoded]) -> "ExampleStore":
        """Write the examples to `path`, where the file appears only when it is complete, and open them."""
        ids: list[np.ndarray] = []
        answer_starts: list[int] = []
        for example in examples:
            ids.append(np.asarray(example.input_ids, dtype=np.int32))
            answer_starts.append(example.answer_start)
        offsets = np.cumsum([0, *map(len, ids)], dtype=np.int32)
        batch = pa.record_batch(
            {
                "input_ids": pa.ListArray.from_arrays(pa.array(offsets), pa.array(np.concatenate(ids))),
                "answer_start": pa.array(answer_starts, pa.int32()),
            }
        )
        path.parent.mkdir(parents=True, exist_ok=True)
        partial = path.with_name(f"{path.name}.{os.getpid()}.partial")  # other processes may write the same file
        try:
            with pa.OSFile(str(partial), "wb") as file, pa.ipc.new_file(file, batch.schema) as writer:
                writer.write_batch(batch)
            os.replace(partial, path)
        except OSError:
            partial.unlink(missing_ok=True)
            raise
        return cls(path)

    def __len__(self) -> int:
        return len(self._answer_starts)

    @overload
    def __getitem__(self, index: int) -> Encoded: ...

    @overload
    def __getitem__(self, index: slice) -> list[Encoded]: ...

    def __getitem__(self, index: int | slice) -> Encoded | list[Encoded]:
        if isinstance(index, slice):
            return [self[i] for i in range(*index.indices(len(self)))]
        index = range(len(self))[index]
        ids = self._ids[self._offsets[index] : self._offsets[index + 1]]
        return Encoded(input_ids=ids, answer_start=int(self._answer_starts[index]))
