"""The check of the package's source, and that asserts of tests hold where Python leaves out those of the package."""

import importlib.util
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def check():
    spec = importlib.util.spec_from_file_location("forbidden", REPOSITORY / ".ci" / "forbidden.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize(
    "line",
    [
        "socket.recv_pyobj()",
        "receive = socket.recv_pyobj",
        "socket.send_pyobj(3)",
        "getattr(socket, 'recv_pyobj')()",
        "AutoModel.from_pretrained(path, trust_remote_code=True)",
        "AutoModel.from_pretrained(path, trust_remote_code=trusted)",
        "load(path, **{'trust_remote_code': True})",
        "np.load(path, allow_pickle=True)",
        "load(path, weights_only=False)",
        "subprocess.run('ls', shell=True)",
        "subprocess.run('ls', shell=1)",
    ],
)
def test_it_finds_what_is_forbidden(check, tmp_path, capsys, line):
    source = f"import somewhere\n\n\ndef run(socket, path, trusted):\n    {line}\n"
    assert [number for number, _ in check.found(source)] == [5]
    (tmp_path / "room").mkdir()
    (tmp_path / "room" / "bad.py").write_text(source)
    assert check.main(tmp_path) == 1
    assert f"{tmp_path / 'room' / 'bad.py'}:5: " in capsys.readouterr().out


def test_what_asks_for_nothing_forbidden_passes(check):
    source = "run(trust_remote_code=False, allow_pickle=False, weights_only=True, shell=False)  # recv_pyobj\n"
    assert list(check.found(source)) == []


def test_the_package_has_none_of_it(check):
    assert check.main(REPOSITORY / "src") == 0


def test_asserts_of_tests_hold():
    """pytest has rewritten them, so that they stay under `python -O` (make test-optimized)."""
    with pytest.raises(AssertionError):
        assert check is None


def test_asserts_of_the_package_are_left_out_where_they_should_be():
    def own():
        source = "def fails():\n    assert False\n"
        namespace = {}
        exec(compile(source, "package", "exec"), namespace)  # noqa: S102 - as modules of the package are compiled
        namespace["fails"]()

    if __debug__:
        with pytest.raises(AssertionError):
            own()
    else:
        own()
