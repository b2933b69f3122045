"""`trtrun serve`: a frontend that speaks HTTP, and an engine in processes of its own that the frontend starts again.

Rooms from the top down: `application` puts a server together and has what its parser workers run; `batches` answers
files of requests; `api` has the protocols; `frontend` takes requests whatever their protocol; `metrics` counts;
`engine`, `http`, `parsing` and `page` do not know each other; `admission` is below all.
"""
