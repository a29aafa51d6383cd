import pytest
from world import World


@pytest.fixture(scope="session")
def worlds():
    """Worlds by size, started when first asked for, all ended with the session."""
    started = {}

    def world(size):
        if size in started and not started[size].is_up:
            started.pop(size).close()
        if size not in started:
            started[size] = World(size)
        return started[size]

    yield world
    for world_of_size in started.values():
        world_of_size.close()


@pytest.fixture(scope="module")
def oracles(tmp_path_factory):
    """Oracles with tokenizers by the name of a model and the lengths of prompts, made when first asked for."""
    from oracle import FAMILIES, WITH_EXPERTS, make_oracle, save_tokenizer_files  # takes seconds

    made = {}

    def oracle(model, *lengths):
        if (model, lengths) not in made:
            more = {"prompt_lengths": lengths} if lengths else {}
            config = (FAMILIES | WITH_EXPERTS)[model]
            made[model, lengths] = make_oracle(config, tmp_path_factory.mktemp(model), **more)
            save_tokenizer_files(made[model, lengths].path)
        return made[model, lengths]

    return oracle
