"""Programs that run on several processes: which part of them one process follows, and which laws it can test."""
