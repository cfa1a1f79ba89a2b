"""The paper's numbers by the fields of a result; results/check_paper_numbers.py compares them with the paper itself."""

from metatokens.paper.report.paper_numbers import paper_table


def test_a_number_is_found_by_the_fields_of_its_result():
    table = paper_table(7)
    meta = {"model": "meta", "position_embedding": "rope", "train_length": 512}

    assert table.at(**meta, length=128) == 100.0
    assert table.at(**meta, length=1024) == 58.9
    assert table.at(**meta, length=4096) is None
    assert table.at(model="gpt-neo", length=1024, train_length=512, variant="") is None  # a dash
    assert table.at(model="gpt-neo", length=512, train_length=512) == 81.2  # of any train length
    assert (
        paper_table(11).at(position_embedding="rope", train_length=128, intervention="no_embed")
        == 32.4
    )
