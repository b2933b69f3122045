"""`trtrun serve`: a frontend that speaks HTTP, and an engine in processes of its own that the frontend starts again.

Rooms from the top down: `application` puts a server together, beside it `reader` is what its reading processes run;
`kserve` and `openai` are its protocols; `frontend` takes requests in no protocol's words; `metrics` counts; `engine`,
`http`, `reading` and `page` do not know each other; `admission` is below all.
"""
