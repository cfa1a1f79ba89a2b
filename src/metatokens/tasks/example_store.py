"""Encoded examples on disk: drawn once, and read by every run that needs them."""

import os
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

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
            if batch.schema != _SCHEMA:
                raise pa.ArrowInvalid(f"its columns are {batch.schema}")
            input_ids, answer_starts = batch.columns
            self._ids = input_ids.values.to_numpy()
            self._offsets = input_ids.offsets.to_numpy()
            self._answer_starts = answer_starts.to_numpy()
            lengths = np.diff(self._offsets)
            if ((self._answer_starts < 0) | (self._answer_starts > lengths)).any():
                raise pa.ArrowInvalid("an answer starts outside its example")
        except (OSError, LookupError, pa.ArrowException) as error:
            raise UserError(f"{path} is no file of encoded examples: {one_line(error)}.") from error

    @classmethod
    def write(cls, path: Path, examples: Iterable[Encoded]) -> "ExampleStore":
        """Write the examples to `path`, where the file appears only when it is complete, and open them."""
        rows: list[dict[str, Any]] = []
        for example in examples:
            ids = np.asarray(example.input_ids, dtype=np.int32)
            rows.append({"input_ids": ids, "answer_start": example.answer_start})
        path.parent.mkdir(parents=True, exist_ok=True)
        # Other processes may write the same file.
        partial = path.with_name(f"{path.name}.{os.getpid()}.partial")
        try:
            with pa.ipc.new_file(str(partial), _SCHEMA) as writer:
                writer.write_batch(pa.RecordBatch.from_pylist(rows, schema=_SCHEMA))
            os.replace(partial, path)
        finally:
            partial.unlink(missing_ok=True)
        return cls(path)

    def __len__(self) -> int:
        return len(self._answer_starts)

    def __getitem__(self, index: Any) -> Any:
        """The example of an index, or those of a slice."""
        rows = range(len(self))[index]
        if isinstance(rows, range):
            return [self[row] for row in rows]
        ids = self._ids[self._offsets[rows] : self._offsets[rows + 1]]
        return Encoded(input_ids=ids, answer_start=int(self._answer_starts[rows]))
