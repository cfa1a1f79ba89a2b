"""Names of files and folders that hold wherever they are read from."""

from pathlib import Path

from metatokens.files import relative_base_name, resolve_base


def test_a_base_is_named_from_a_folder_that_has_nothing_in_common_with_its_own():
    far = Path("/one/two")  # neither is there

    assert relative_base_name(far, "/nowhere/base") == "../../nowhere/base"
    assert relative_base_name(far, "someone/base") == "someone/base"


def test_a_base_behind_links_is_found_from_where_it_is_named(tmp_path):
    for folder in ("base", "elsewhere/deep", "written/run"):
        (tmp_path / folder).mkdir(parents=True)
    (tmp_path / "link").symlink_to(tmp_path / "base")
    (tmp_path / "out").symlink_to(tmp_path / "elsewhere/deep")  # behind which `..` is elsewhere

    name = relative_base_name(tmp_path / "out", str(tmp_path / "link"))

    base = resolve_base(tmp_path / "out", name)
    assert name == "../../link"
    assert base == str(tmp_path / "link")
    assert relative_base_name(tmp_path / "written/run", base) == "../../link"
