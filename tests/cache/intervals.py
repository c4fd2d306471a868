"""Plans in short, for tests."""

import msgspec


def chosen(plan, layout=None):
    """(m_lo, m_hi, kernel, tile) of every interval."""
    return [
        (entry.m_lo, entry.m_hi, entry.kernel, msgspec.json.decode(entry.config)["tile"])
        for entry in plan.intervals(layout)
    ]
