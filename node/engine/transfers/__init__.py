"""KV transfers of one worker process: threads beside the model's."""
