"""`kvant serve`: an API process without torch, which starts and supervises an engine process.

A request passes these modules of the API process, in this order:

    app         the ASGI application and its table of routes; guard checks sizes, deadlines and keys
    answers     `Call.read` parses the body: requests, with the types of wire and the tables of parameters
    service     opens one sequence per answer: template renders the chat in a process of its own
    supervisor  sends it to the engine process, as messages says

and these of the engine process: engine_process, then `kvant.engine.driver`. Tokens come back as text the same
way, and answers writes them. anthropic and responses read and write the other APIs' forms.
"""
