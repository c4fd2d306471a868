"""For all tests."""

import signal


def pytest_configure():
    """Background jobs of a shell ignore Ctrl-C, and so would the processes that tests start and interrupt."""
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)
