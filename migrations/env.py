"""Run migrations on the connection and in the transaction of the caller, `repo_service.index.migrate`."""

from alembic import context

from repo_service.index.models import Base

context.configure(
    connection=context.config.attributes["connection"],
    target_metadata=Base.metadata,
)
context.run_migrations()
