"""How often to kill."""


def pytest_addoption(parser):
    parser.addoption("--kills", type=int, default=10, help="how often the job is killed")
    parser.addoption("--seed", type=int, default=1, help="of the instants at which it is")
