"""The sending side of the stream: packs events into frames, publishes them and serves replays."""
