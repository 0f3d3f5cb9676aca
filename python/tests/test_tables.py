"""Tables are readable by Arrow readers, without a copy and with their types, and without any such reader."""

import homenode
import pandas
import polars
import pyarrow
import pytest

TABLES = [
    "vms", "accesses", "nodes", "links", "events", "starts", "decisions", "said", "summary",
    "vms_over_time", "memory_over_time", "nodes_over_time", "links_over_time",
]  # fmt: skip


@pytest.fixture(scope="module")
def runs():
    return homenode.simulate("churn", ["default", "homenode"], every="10s")


@pytest.mark.parametrize("name", TABLES)
def test_all_readers_see_the_same(runs, name):
    table = getattr(runs, name)
    columns = table.to_dict()
    assert len(table) > 0 and list(table) == table.columns == table.keys() == list(columns)
    arrow = pyarrow.table(table)
    assert arrow.to_pydict() == columns
    assert polars.DataFrame(table).to_dict(as_series=False) == columns
    frame = pandas.DataFrame.from_arrow(table)
    for column, cells in columns.items():
        read = [None if pandas.isna(cell) else cell for cell in frame[column]]
        assert read == cells, column
    # Every column has a description.
    assert set(table.about) == set(columns) and all(table.about.values())
    assert {field.metadata[b"about"].decode() for field in arrow.schema} == set(table.about.values())


def test_types_do_not_depend_on_cells(runs):
    """A column without known values keeps its usual type."""
    assert runs.vms["permit_punished_count"] == [None] * 6
    schema = pyarrow.table(runs.vms).schema
    assert schema.field("permit_punished_count").type == pyarrow.uint64()
    assert schema.field("runtime_s").type == pyarrow.float64()
    assert pyarrow.schema(runs.vms) == schema


def test_a_table_outlives_what_it_is_of(runs):
    arrow = pyarrow.table(homenode.simulate("churn", "default").vms)
    assert arrow.equals(pyarrow.table(runs["default"].vms))


def test_tables_are_mappings_and_shown(runs):
    table = runs.vms
    assert "runtime_s" in table and "runtime" not in table
    with pytest.raises(KeyError, match="did you mean `runtime_s`"):
        table["runtime"]
    assert [row["vm"] for row in table.rows()] == table["vm"]
    assert "<th>vm</th>" in table._repr_html_() and f"of {len(list(table))} columns" in repr(table)
    assert str(table).splitlines()[1].split()[:3] == ["default", "long", "cg.B"]
    html = homenode.Scenario("churn").change_vm("long", name="<b>&").replace(event=None, policies=None, duration="1s")
    assert "&lt;b&gt;&amp;" in homenode.simulate(html, "default").vms._repr_html_()
