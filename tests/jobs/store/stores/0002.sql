-- Made by llmserve with tables of version 0002, under alembic.
BEGIN TRANSACTION;
CREATE TABLE alembic_version (
	version_num VARCHAR(32) NOT NULL,
	CONSTRAINT alembic_version_pkc PRIMARY KEY (version_num)
);
INSERT INTO "alembic_version" VALUES('0002');
CREATE TABLE batches (
	seq INTEGER NOT NULL PRIMARY KEY AUTOINCREMENT,
	id TEXT NOT NULL,
	"key" TEXT NOT NULL,
	endpoint TEXT NOT NULL,
	input_file_id TEXT NOT NULL,
	completion_window TEXT NOT NULL,
	metadata TEXT,
	output_expires_s INTEGER,
	idempotency_key TEXT,
	asked TEXT NOT NULL,
	status TEXT NOT NULL,
	epoch INTEGER NOT NULL,
	owner INTEGER,
	created_at INTEGER NOT NULL,
	expires_at INTEGER NOT NULL,
	in_progress_at INTEGER,
	finalizing_at INTEGER,
	completed_at INTEGER,
	failed_at INTEGER,
	expired_at INTEGER,
	cancelling_at INTEGER,
	cancelled_at INTEGER,
	total INTEGER NOT NULL,
	completed INTEGER NOT NULL,
	failed INTEGER NOT NULL,
	tokens INTEGER NOT NULL,
	errors TEXT,
	output_file_id TEXT,
	error_file_id TEXT,
	UNIQUE ("key", idempotency_key),
	UNIQUE (id)
);
INSERT INTO "batches" VALUES(1,'batch_a','red','/v1/completions','file-a','24h',NULL,NULL,'once','digest','in_progress',1,1,1000,87400,1002,NULL,NULL,NULL,NULL,NULL,NULL,3,1,0,30,NULL,NULL,NULL);
CREATE TABLE files (
	seq INTEGER NOT NULL PRIMARY KEY AUTOINCREMENT,
	id TEXT NOT NULL,
	"key" TEXT NOT NULL,
	filename TEXT NOT NULL,
	purpose TEXT NOT NULL,
	bytes INTEGER NOT NULL,
	created_at INTEGER NOT NULL,
	expires_at INTEGER,
	UNIQUE (id)
);
INSERT INTO "files" VALUES(1,'file-a','red','in.jsonl','batch',10,1000,NULL);
CREATE TABLE parts (
	file_id TEXT NOT NULL,
	place INTEGER NOT NULL,
	name TEXT NOT NULL,
	bytes INTEGER NOT NULL, crc INTEGER,
	PRIMARY KEY (file_id, place),
	FOREIGN KEY(file_id) REFERENCES files (id) ON DELETE CASCADE
);
INSERT INTO "parts" VALUES('file-a',0,'1-in.jsonl',10,77);
CREATE TABLE segments (
	batch_id TEXT NOT NULL,
	epoch INTEGER NOT NULL,
	kind TEXT NOT NULL,
	name TEXT NOT NULL,
	safe_bytes INTEGER NOT NULL, crc INTEGER,
	PRIMARY KEY (batch_id, epoch, kind),
	FOREIGN KEY(batch_id) REFERENCES batches (id) ON DELETE CASCADE
);
INSERT INTO "segments" VALUES('batch_a',1,'output','1-out.jsonl',70,88);
CREATE TABLE servers (
	generation INTEGER NOT NULL PRIMARY KEY AUTOINCREMENT,
	name TEXT NOT NULL,
	started_at FLOAT NOT NULL
);
INSERT INTO "servers" VALUES(1,'host:1',1000.0);
CREATE INDEX ix_parts_name ON parts (name);
CREATE INDEX ix_batches_input_file_id ON batches (input_file_id);
CREATE INDEX ix_batches_status ON batches (status);
CREATE INDEX ix_segments_name ON segments (name);
DELETE FROM "sqlite_sequence";
INSERT INTO "sqlite_sequence" VALUES('servers',1);
INSERT INTO "sqlite_sequence" VALUES('files',1);
INSERT INTO "sqlite_sequence" VALUES('batches',1);
COMMIT;
