"""The payment provider sandbox: a real HTTP server with a durable ledger of its own.

It is the independent witness of the audit, so it imports nothing of the services it judges.
"""
