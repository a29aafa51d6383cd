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
