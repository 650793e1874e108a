"""The truth about an episode, decided from the engine's own final state and the clients' outcome.

This room imports no detector, no ledger and no engine: only msgspec and the standard library. An engine under test, in
this process or in another one, hands over an EpisodeEnd. Nothing here reads an event stream.

episode_end.py    the seam: the final state of an episode as plain data, of any engine
what_happened.py  from that state to harms: requests that never finish, blocks that are never freed, work done twice
claims.py         which finding codes a harm makes true
"""
