"""The schemas of a table's parts are joined, or refused with an error that names the part."""

from __future__ import annotations

import pytest
from table_packages import package

from salientpp.datasets.tabular.column_types import joined_schema
from salientpp.datasets.tabular.file_formats import Looked

pa = package("pyarrow")


class CountedSchema:
    """Arrow schema that counts how often it made a list of all its names, which takes time in proportion to the columns."""

    def __init__(self, names):
        self._schema, self.lists = pa.schema([(name, pa.int64()) for name in names]), 0

    @property
    def names(self):
        self.lists += 1
        return self._schema.names

    def __getattr__(self, name):
        return getattr(self._schema, name)


@pytest.mark.parametrize("is_sparse", [False, True])
def test_a_part_lists_its_names_as_often_for_many_columns_as_for_few(is_sparse):
    def lists(num_columns, num_parts):
        names = [f"c{number}" for number in range(num_columns)]
        own = [[*names, f"own {part}"] if is_sparse else names for part in range(num_parts)]
        schemas = [CountedSchema(each) for each in own]
        looked = [(f"{part}", Looked(schema, 1, is_sparse=is_sparse)) for part, schema in enumerate(schemas)]
        assert joined_schema(looked, "t").names == list(dict.fromkeys(name for each in own for name in each))
        return max(schema.lists for schema in schemas)

    assert lists(50, 20) == lists(2, 2)


def test_the_first_column_that_a_part_lacks_is_named():
    schemas = [pa.schema([(name, pa.int64()) for name in names]) for names in ("abcd", "ad")]
    looked = [(f"{part}.parquet", Looked(schema, 1)) for part, schema in enumerate(schemas)]
    with pytest.raises(ValueError, match=r"t: 1\.parquet has no column 'b', which 0\.parquet has"):
        joined_schema(looked, "t")
    with pytest.raises(ValueError, match=r"t: 1\.parquet has no column 'b', which 0\.parquet has"):
        joined_schema(looked[::-1], "t")
