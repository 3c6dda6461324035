"""Questions to the manuals of Django and SQLAlchemy, and questions that they do not answer.

Each of the first has the documents that answer it; others may mention what is asked. Written before anything was measured.
"""

from __future__ import annotations

DJANGO = "docs/"
SQLALCHEMY = "doc/build/"

# A question, and the documents that answer it.
ANSWERED: list[tuple[str, tuple[str, ...]]] = [
    ("How do I rotate the secret key without logging everybody out?", ("docs/ref/settings.txt", "docs/topics/signing.txt", "docs/howto/deployment/checklist.txt")),
    ("Which setting limits how many fields a request may carry?", ("docs/ref/settings.txt",)),
    ("How do I make a queryset lock rows until the end of the transaction?", ("docs/ref/models/querysets.txt",)),
    ("Which method follows foreign keys with a join so that the database is not asked again?", ("docs/ref/models/querysets.txt", "docs/topics/db/optimization.txt")),
    ("How can I run code only after a transaction was committed?", ("docs/topics/db/transactions.txt",)),
    ("How do I send the token against cross site request forgery with JavaScript?", ("docs/howto/csrf.txt",)),
    ("What stops my site from being shown inside a frame?", ("docs/ref/clickjacking.txt",)),
    ("Which command prints the SQL of a migration?", ("docs/ref/django-admin.txt", "docs/topics/migrations.txt", "docs/intro/tutorial02.txt")),
    ("How do I squash several migrations into one?", ("docs/topics/migrations.txt", "docs/ref/django-admin.txt")),
    ("Where are messages kept that are shown once to a user?", ("docs/ref/contrib/messages.txt",)),
    ("How do I use Argon2 for passwords?", ("docs/topics/auth/passwords.txt",)),
    ("Which model field stores a UUID?", ("docs/ref/models/fields.txt",)),
    ("How do I split a long list of objects over several pages?", ("docs/topics/pagination.txt", "docs/ref/paginator.txt")),
    ("How can I write my own template filter?", ("docs/howto/custom-template-tags.txt",)),
    ("How do I send an email with an HTML alternative and attachments?", ("docs/topics/email.txt",)),
    ("Which cache backend keeps values in the memory of the process?", ("docs/topics/cache.txt",)),
    ("How do I translate strings lazily, when they are used?", ("docs/topics/i18n/translation.txt",)),
    ("How can I test a view with a dummy browser?", ("docs/topics/testing/tools.txt",)),
    ("How do I run Selenium tests against a live server?", ("docs/topics/testing/tools.txt",)),
    ("How are large file uploads written to a temporary file?", ("docs/topics/http/file-uploads.txt", "docs/ref/files/uploads.txt")),
    ("How do I serve static files with a hash in their names?", ("docs/ref/contrib/staticfiles.txt",)),
    ("Which signal is sent after a model is saved?", ("docs/ref/signals.txt",)),
    ("How does one model point to objects of any other model?", ("docs/ref/contrib/contenttypes.txt",)),
    ("How do I restrict a view to users who are logged in?", ("docs/topics/auth/default.txt",)),
    ("How can I send reads to a replica database?", ("docs/topics/db/multi-db.txt",)),
    ("How do I express a condition inside a query, like if and else?", ("docs/ref/models/conditional-expressions.txt",)),
    ("Which lookup finds geometries within a distance?", ("docs/ref/contrib/gis/geoquerysets.txt", "docs/ref/contrib/gis/db-api.txt")),
    ("How do I write a middleware?", ("docs/topics/http/middleware.txt",)),
    ("How can I add an action to the change list page of the admin?", ("docs/ref/contrib/admin/actions.txt",)),
    ("How do I index only the rows that meet a condition?", ("docs/ref/models/indexes.txt",)),
    ("How can persistent connections be checked for health before they are used again?", ("docs/ref/databases.txt", "docs/ref/settings.txt")),
    ("How do I stream a large CSV file to the browser?", ("docs/howto/outputting-csv.txt",)),
    ("How do I cache the output of a whole view?", ("docs/topics/cache.txt",)),
    ("How do I generate a sitemap?", ("docs/ref/contrib/sitemaps.txt",)),
    ("How do I offer news as RSS?", ("docs/ref/contrib/syndication.txt",)),
    ("How do I deploy with gunicorn?", ("docs/howto/deployment/wsgi/gunicorn.txt",)),
    ("What should be checked before a site goes to production?", ("docs/howto/deployment/checklist.txt",)),
    ("How do I write a custom management command?", ("docs/howto/custom-management-commands.txt",)),
    ("How do I show a form several times on one page?", ("docs/topics/forms/formsets.txt", "docs/ref/forms/formsets.txt")),
    ("How do I search for words with a rank in PostgreSQL?", ("docs/ref/contrib/postgres/search.txt",)),
    ("How do I test whether a connection of the pool is still alive before it is used?", ("doc/build/core/pooling.rst",)),
    ("What is the difference between joined and select-in eager loading?", ("doc/build/orm/queryguide/relationships.rst",)),
    ("How do I put columns that many tables have into a mixin?", ("doc/build/orm/declarative_mixins.rst",)),
    ("How are children deleted when they are removed from their parent?", ("doc/build/orm/cascades.rst",)),
    ("What does flushing a session do, compared with committing it?", ("doc/build/orm/session_basics.rst",)),
    ("How do I use the ORM with asyncio?", ("doc/build/orm/extensions/asyncio.rst",)),
    ("How do I relate two tables by a third one that has columns of its own?", ("doc/build/orm/basic_relationships.rst", "doc/build/orm/extensions/associationproxy.rst")),
    ("How do I write an upsert with the ORM?", ("doc/build/orm/queryguide/dml.rst", "doc/build/orm/persistence_techniques.rst")),
    ("Why is an instance not bound to a session, so that a lazy load can not proceed?", ("doc/build/errors.rst",)),
    ("How do I track changes inside a mutable JSON column?", ("doc/build/orm/extensions/mutable.rst",)),
    ("How can a class hierarchy be stored in one table?", ("doc/build/orm/inheritance.rst",)),
    ("How do I notice concurrent updates by a version counter?", ("doc/build/orm/versioning.rst",)),
    ("How do I load the definition of tables from an existing database?", ("doc/build/core/reflection.rst", "doc/build/tutorial/metadata.rst")),
    ("How do I define an attribute that works on instances and in queries alike?", ("doc/build/orm/extensions/hybrid.rst",)),
    ("How do I distribute rows over several databases by sharding?", ("doc/build/orm/extensions/horizontal_shard.rst", "doc/build/orm/examples.rst")),
    ("How do I write my own column type that processes values?", ("doc/build/core/custom_types.rst",)),
    ("How do I keep the items of a list in the order of a position column?", ("doc/build/orm/extensions/orderinglist.rst",)),
    ("How do I map several columns to one Python object, like a point?", ("doc/build/orm/composites.rst",)),
    ("How do I log the statements that the engine executes?", ("doc/build/core/engines.rst",)),
    ("How do I run a test inside a transaction that is rolled back at its end?", ("doc/build/orm/session_transaction.rst", "docs/topics/testing/tools.txt")),
]  # fmt: skip

# About other things altogether.
FOREIGN = [
    "Who won the football world cup in 1998?", "What is the capital of Australia?", "How do I bake sourdough bread?",
    "What is the boiling point of ethanol?", "Who wrote the novel Middlemarch?", "Which river flows through Vienna?",
    "How tall is Mount Kilimanjaro?", "What year did the Berlin wall fall?", "How many moons does Saturn have?",
    "Which vitamin prevents scurvy?", "What is the best way to prune roses?", "Who composed the Goldberg variations?",
    "What is the dosage of ibuprofen for children?", "Which planet is closest to the sun?",
    "How does photosynthesis work?", "What language is spoken in Suriname?", "How do I change a bicycle tyre?",
    "What is the GDP of Norway?", "When was the Magna Carta signed?", "What is the speed limit on German motorways?",
    "How do I reset the password of my online bank?", "What time does the museum open on Sundays?",
    "What colour is the miller's cat?", "How long do I have to boil an egg?", "Which train goes to Lisbon tonight?",
    "How do I tune a piano?", "What does a notary cost in Spain?", "How many strings does a lute have?",
    "Who discovered the circulation of the blood?", "How is cheese made from sheep's milk?",
]  # fmt: skip

# About software of the same kind, in words that the manuals have, but not in them.
NEAR = [
    "How do I register a blueprint in Flask?", "How do I declare a dependency in a FastAPI route?",
    "How do I define an ingress for a Kubernetes service?", "How do I write a serializer for nested objects in REST framework?",
    "How do I retry a failed Celery task with exponential backoff?", "How do I shard a collection in MongoDB?",
    "How do I configure a Cisco router for BGP?", "How do I train a convolutional network in JAX?",
    "How do I mount an NFS share in Fedora?", "How do I pivot a pandas data frame?",
    "How do I write a reducer for a Redux store?", "How do I roll back a Helm release?",
    "How do I set up replication between two Redis servers?", "How do I create a partitioned topic in Kafka?",
    "How do I vacuum a table in PostgreSQL that has grown too large?", "How do I write a goroutine that can be cancelled?",
    "How do I borrow a value twice in Rust?", "How do I center a div with flexbox?",
    "How do I write a lifetime annotation for a struct?", "How do I build a Docker image in several stages?",
    "How do I run a Spark job on a cluster?", "How do I add a column to a Cassandra table?",
    "How do I make a Vue component reactive?", "How do I write a GraphQL resolver in Apollo?",
    "How do I rebase a branch onto another in git?", "How do I mount a volume in docker compose?",
    "How do I parse XML with lxml and namespaces?", "How do I plot a histogram in matplotlib?",
    "How do I tune the garbage collector of the Java virtual machine?", "How do I schedule a cron job on AWS Lambda?",
]  # fmt: skip
