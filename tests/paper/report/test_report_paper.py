"""The paper's numbers by the fields of a result; results/check_paper_numbers.py compares them with the paper itself."""

from metatokens.paper.report.paper import paper_table

TABLES = (1, 2, 3, *range(7, 18))


def test_all_tables_with_results_are_there() -> None:
    assert all(paper_table(number).rows for number in TABLES)


def test_a_number_is_found_by_the_fields_of_its_result() -> None:
    table = paper_table(7)
    where = {"model": "meta", "position_embedding": "rope", "train_length": 512}
    values = [table.at(**where, length=length) for length in (128, 256, 512, 1024, 2048)]
    assert values == [100.0, 100.0, 99.3, 58.9, 5.6]
    assert table.at(**where, length=4096) is None
    assert table.at(model="gpt-neo", length=1024, train_length=512, variant="") is None  # a dash
    assert table.at(model="gpt-neo", length=512, train_length=512) == 81.2  # of any train length
    assert paper_table(11).at(position_embedding="rope", train_length=128, intervention="no_embed") == 32.4
