"""Laws of tables as columns: rows that are picked from the columns make the table that PyTorch Frame picks, bit for bit."""

from __future__ import annotations

import json

import pytest
import torch
from tables import MultiNestedTensor, TensorFrame, embedding, nested, same, stype, table
from torch_geometric.data import Data

from salientpp.store.frames import Frame, formats_of_columns, put_tables_together, shortened, take_apart


def picked(frame: Frame, columns: dict[str, torch.Tensor], index: torch.Tensor) -> TensorFrame:
    return frame.put_together({name: rows[index] for name, rows in columns.items()}, index.numel())


@pytest.mark.parametrize("with_y", [True, False])
@pytest.mark.parametrize("index", [[], [0], [3, 3, 0], [39, 7, 38, 1, 0, 12, 7]])
def test_picked_rows_equal_those_of_torch_frame(index, with_y):
    whole, index = table(40, with_y), torch.tensor(index, dtype=torch.int64)
    frame, columns = take_apart("tf", whole, "data")
    assert set(frame.columns) == set(columns) and all(len(rows) == 40 for rows in columns.values())
    assert all(rows.is_contiguous() for rows in columns.values())
    assert same(picked(frame, columns, index), whole[index])


def test_a_table_survives_its_description_as_json():
    whole = table(20)
    frame, columns = take_apart("tf", whole, "data")
    said = json.loads(json.dumps(frame.to_json(), sort_keys=True))
    assert Frame.of_json(said) == frame
    assert same(picked(Frame.of_json(said), columns, torch.arange(20)), whole)


@pytest.mark.parametrize(
    "dtype", [torch.int64, torch.int32, torch.int16, torch.uint8, torch.int8, torch.bool, torch.float64, torch.float16]
)
def test_every_dtype_comes_back(dtype):
    whole = TensorFrame(
        {
            stype.categorical: (torch.arange(12).view(6, 2) % 100).to(dtype),
            stype.multicategorical: nested(6, 2, torch.float32),
        },
        {stype.categorical: ["a", "b"], stype.multicategorical: ["c", "d"]},
    )
    whole.feat_dict[stype.multicategorical].values = torch.arange(
        len(whole.feat_dict[stype.multicategorical].values)
    ).to(dtype)
    frame, columns = take_apart("tf", whole, "data")
    assert same(picked(frame, columns, torch.tensor([5, 0])), whole[torch.tensor([5, 0])])


def test_integers_are_stored_in_the_shortest_dtype_that_holds_them():
    for least, most, expected in [
        (-1, 127, torch.int8), (0, 255, torch.uint8), (-1, 255, torch.int16), (0, 2**15, torch.int32), (-(2**31), 0, torch.int32),
        (0, 2**31, torch.int64), (-(2**63), 2**63 - 1, torch.int64),
    ]:  # fmt: skip
        values = torch.tensor([least, most])
        assert shortened(values).dtype == expected
        assert torch.equal(shortened(values).long(), values)
    assert shortened(torch.tensor([300], dtype=torch.int16)).dtype == torch.int16
    assert shortened(torch.tensor([3.0])).dtype == torch.float32 and shortened(torch.tensor([True])).dtype == torch.bool


def test_cells_of_any_length_take_the_row_of_the_longest():
    lists = [[[], [1, 2]], [[], []], [[7] * 9, [8]]]
    ragged = MultiNestedTensor.from_tensor_mat(
        [[torch.tensor(cell, dtype=torch.int64) for cell in row] for row in lists]
    )
    whole = TensorFrame({stype.multicategorical: ragged}, {stype.multicategorical: ["a", "b"]})
    frame, columns = take_apart("tf", whole, "data")
    assert list(columns["tf.multicategorical"].shape) == [3, 10] and columns["tf.multicategorical"].dtype == torch.int8
    assert columns["tf.multicategorical.lengths"].tolist() == [[0, 2], [0, 0], [9, 1]]
    assert same(picked(frame, columns, torch.tensor([1, 2, 1])), whole[torch.tensor([1, 2, 1])])


def test_cells_without_any_value_and_tables_without_columns():
    empty = MultiNestedTensor(3, 1, torch.empty(0, dtype=torch.float32), torch.zeros(4, dtype=torch.int64))
    whole = TensorFrame({stype.sequence_numerical: empty}, {stype.sequence_numerical: ["a"]})
    frame, columns = take_apart("tf", whole, "data")
    assert same(picked(frame, columns, torch.tensor([2, 0])), whole[torch.tensor([2, 0])])
    bare = TensorFrame({}, {}, num_rows=3)
    frame, columns = take_apart("tf", bare, "data")
    assert not columns and same(frame.put_together({}, 2), bare[torch.tensor([0, 1])])


def test_what_a_column_cannot_hold_is_refused_by_name():
    whole = table(4)
    whole.feat_dict[stype.numerical] = whole.feat_dict[stype.numerical].to("meta")
    with pytest.raises(
        ValueError, match=r"data\['user'\].tf.numerical must be a dense tensor with values, .* on meta; convert it"
    ):
        take_apart("tf", whole, "data['user']")
    whole = table(4)
    whole.feat_dict[stype.numerical] = [1, 2]
    with pytest.raises(
        ValueError, match="data.tf.numerical must be a tensor, a MultiEmbeddingTensor or a MultiNestedTensor, got list"
    ):
        take_apart("tf", whole, "data")


def test_a_semantic_type_without_tensors_is_refused():
    whole = table(4)
    whole.feat_dict[stype.text_tokenized] = {}
    with pytest.raises(
        ValueError, match="data.tf must have a tensor for each semantic type, got none for text_tokenized"
    ):
        take_apart("tf", whole, "data")


def test_a_format_of_a_table_encodes_its_floating_point_columns():
    frame, columns = take_apart("tf", table(8), "data")
    known = {("user", name): (rows.dtype, rows.shape[1:]) for name, rows in columns.items()}
    found = formats_of_columns(
        "store_as", {"tf": "bf16", ("user", "tf.numerical"): "fp16"}, {("user", "tf"): frame}, known
    )
    # A row of one float would take 4 bytes either way, and integers are exact.
    floats = ("tf.numerical", "tf.sequence_numerical", "tf.embedding", "tf.text_embedded", "tf.image_embedded")
    assert found == {**{("user", name): "bf16" for name in floats}, ("user", "tf.numerical"): "fp16"}
    frame, columns = take_apart(
        "tf", TensorFrame({stype.categorical: torch.zeros(2, 1).long()}, {stype.categorical: ["a"]}), "data"
    )
    known = {("user", name): (rows.dtype, rows.shape[1:]) for name, rows in columns.items()}
    with pytest.raises(
        ValueError, match=r"store_as\['tf'\]: no rows of this TensorFrame would get shorter as int8.*leave it out"
    ):
        formats_of_columns("store_as", {"tf": "int8"}, {("user", "tf"): frame}, known)


def test_a_table_replaces_its_columns_and_stays_missing_with_them():
    frame, columns = take_apart("tf", TensorFrame({stype.embedding: embedding(3, 2)}, {stype.embedding: ["a"]}), "data")
    data = Data(x=torch.ones(3, 1), **columns)
    put_tables_together(data._store, {"tf": frame})
    assert set(data.keys()) == {"x", "tf"} and same(data.tf, frame.put_together(columns, 3))
    data = Data(x=torch.ones(3, 1))
    put_tables_together(data._store, {"tf": frame})
    assert list(data.keys()) == ["x"]
