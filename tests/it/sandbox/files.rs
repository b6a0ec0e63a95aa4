//! The private file system of a Python guest.

#![expect(clippy::unwrap_used, reason = "helpers of tests may panic")]

use bytesize::ByteSize;
use rstest::rstest;
use wardian::sandbox::{ExecOutcome, ExecRequest, Exit, Limits};

use super::python;

/// Answers what a call returns or with the name of the errno it raises.
const ATTEMPT: &str = "
import errno, os
def attempt(function, *arguments, **keywords):
    try: return function(*arguments, **keywords)
    except OSError as e: return errno.errorcode[e.errno]
";

fn exec(code: &str) -> ExecOutcome {
    let code = format!("{ATTEMPT}\n{code}");
    python()
        .exec(&ExecRequest::new(code), &Limits::default())
        .unwrap()
}

#[track_caller]
fn prints(code: &str, expected: &str) {
    let outcome = exec(code);
    assert_eq!(outcome.stdout_text(), expected, "{}", outcome.stderr_text());
    assert!(outcome.exit.is_success(), "{}", outcome.exit);
}

#[rstest]
#[case::write_and_read(
    "open('x.txt', 'w').write('a\\nb\\n')\nprint(open('x.txt').readlines(), os.listdir(), os.getcwd())",
    "['a\\n', 'b\\n'] ['x.txt'] /work\n"
)]
#[case::append(
    "for i in range(3): print(i, end='', file=open('x', 'a'))\nprint(open('x').read())",
    "012\n"
)]
#[case::update_in_place(
    "open('x', 'wb').write(b'abcdef')\nwith open('x', 'r+b') as f:\n    f.seek(2); f.write(b'ZZ'); f.seek(0); print(f.read())",
    "b'abZZef'\n"
)]
#[case::a_hole_reads_as_zeros(
    "with open('x', 'w+b') as f:\n    f.write(b'abc'); f.truncate(2); f.seek(5); f.write(b'z'); f.seek(0); print(f.read())",
    "b'ab\\x00\\x00\\x00z'\n"
)]
#[case::exclusive("open('x', 'x').close(); print(attempt(open, 'x', 'x'))", "EEXIST\n")]
#[case::absent(
    "print(attempt(open, 'x'), attempt(open, ''), attempt(os.stat, 'a/b'))",
    "ENOENT ENOENT ENOENT\n"
)]
#[case::not_a_directory(
    "open('x', 'w').close(); print(attempt(open, 'x/'), attempt(os.listdir, 'x'), attempt(os.rmdir, 'x'))",
    "ENOTDIR ENOTDIR ENOTDIR\n"
)]
#[case::directories(
    "os.makedirs('a/b'); print(attempt(os.mkdir, 'a'), attempt(os.rmdir, 'a'), attempt(open, 'a', 'w'), attempt(os.unlink, 'a'))\nos.removedirs('a/b'); print(os.listdir())",
    "EEXIST ENOTEMPTY EISDIR EISDIR\n[]\n"
)]
#[case::rename_replaces(
    "open('a', 'w').write('A'); open('b', 'w').write('B'); os.replace('a', 'b')\nprint(os.listdir(), open('b').read())",
    "['b'] A\n"
)]
#[case::rename_below_itself(
    "os.makedirs('a/b'); print(attempt(os.rename, 'a', 'a/b/c'), attempt(os.rename, 'a', 'a'), os.listdir('a'))",
    "EINVAL None ['b']\n"
)]
#[case::links(
    "os.mkdir('d'); open('d/f', 'w').write('F'); os.symlink('d', 's'); os.link('d/f', 'h')\nprint(open('s/f').read(), os.readlink('s'), os.path.islink('s'), os.stat('h').st_nlink, os.path.realpath('s/f'))",
    "F d True 2 /work/d/f\n"
)]
#[case::a_loop_of_links(
    "os.symlink('a', 'b'); os.symlink('b', 'a'); print(attempt(open, 'a'), attempt(os.listdir, 'a'))",
    "ELOOP ELOOP\n"
)]
#[case::a_deleted_file_lives_while_open(
    "with open('x', 'w+') as f:\n    f.write('abc'); os.unlink('x'); f.seek(0); print(f.read(), os.path.exists('x'))",
    "abc False\n"
)]
#[case::permissions(
    "open('x', 'w').close(); os.chmod('x', 0o400)\nprint(oct(os.stat('x').st_mode), attempt(open, 'x', 'w'), os.access('x', os.W_OK))",
    "0o100400 EACCES False\n"
)]
#[case::a_listing_survives_changes(
    "for i in range(300): open(f'{i}', 'w').close()\nfor entry in os.scandir(): os.unlink(entry)\nprint(os.listdir())",
    "[]\n"
)]
#[case::changing_directory(
    "os.makedirs('a/b'); os.chdir('a/b'); os.chdir('..'); open('x', 'w').close()\nprint(os.getcwd(), os.listdir(), os.listdir('..'))",
    "/work/a ['b', 'x'] ['a']\n"
)]
#[case::devices(
    "print(open('/dev/null').read(), len(open('/dev/urandom', 'rb').read(4)), attempt(open, '/dev/x', 'w'), flush=True)\nprint('out', file=open('/dev/stdout', 'w'))",
    " 4 EROFS\nout\n"
)]
#[case::temporary_files(
    "import tempfile\nwith tempfile.TemporaryDirectory() as d, tempfile.TemporaryFile() as f:\n    f.write(b'x'); print(d.startswith('/tmp/'), f.seek(0), f.read())\nprint(os.listdir('/tmp'))",
    "True 0 b'x'\n[]\n"
)]
#[case::whole_trees(
    "import pathlib, shutil\npathlib.Path('a/b').mkdir(parents=True); pathlib.Path('a/b/c').write_text('C')\nshutil.copytree('a', 'z'); shutil.rmtree('a')\nprint([(p, d, f) for p, d, f in os.walk('.')], pathlib.Path('z/b/c').read_text())",
    "[('.', ['z'], []), ('./z', ['b'], []), ('./z/b', [], ['c'])] C\n"
)]
#[case::modules_of_the_program(
    "open('helper.py', 'w').write('x = 5')\nopen('json.py', 'w').write('x = 6')\nimport helper, json; print(helper.x, json.dumps(7))",
    "5 7\n"
)]
fn files_work_as_natively(#[case] code: &str, #[case] expected: &str) {
    prints(code, expected);
}

#[test]
fn archives_are_written_and_read() {
    prints(
        "
import bz2, gzip, lzma, tarfile, zipfile, zlib
data = b'text ' * 1000
print([m.decompress(m.compress(data)) == data for m in (zlib, gzip, bz2, lzma)])
with zipfile.ZipFile('a.zip', 'w', zipfile.ZIP_DEFLATED) as z: z.writestr('m.py', 'x = 8')
for kind in 'gz', 'bz2', 'xz':
    with tarfile.open('a', f'w:{kind}') as t: t.add('a.zip')
    with tarfile.open('a') as t: t.extractall(kind, filter='data')
    print(zipfile.ZipFile(f'{kind}/a.zip').read('m.py'))
import sys; sys.path.append('a.zip')
import m; print(m.x)
",
        "[True, True, True, True]\nb'x = 8'\nb'x = 8'\nb'x = 8'\n8\n",
    );
}

#[test]
fn databases_are_files() {
    prints(
        "import sqlite3
database = sqlite3.connect('people.db')
with database:
    database.execute('create table people (name text, age int)')
    database.executemany('insert into people values (?, ?)', [('Ann', 31), ('Bob', 42)])
try:
    with database:
        database.execute('delete from people')
        raise ValueError
except ValueError: pass
database.close()
database = sqlite3.connect('people.db')
print(database.execute('select count(*), sum(age) from people').fetchone(), os.listdir())
other = sqlite3.connect('people.db', timeout=1)
database.execute('begin exclusive')
try: other.execute('delete from people')
except sqlite3.OperationalError as error: print(error)
database.rollback()
database.execute('create virtual table texts using fts5(t)')
database.execute(\"insert into texts values ('some words'), ('other words')\")
print(database.execute(\"select * from texts where t match 'some'\").fetchall())
database.create_function('double', 1, lambda x: 2 * x)
print(database.execute('select double(age), sqrt(4) from people').fetchall())
",
        "(2, 73) ['people.db']\ndatabase is locked\n[('some words',)]\n[(62, 2.0), (84, 2.0)]\n",
    );
}

#[test]
fn time_zones_are_known() {
    prints(
        "
import datetime, zoneinfo
for zone in 'America/New_York', 'US/Pacific', 'Asia/Kathmandu':
    print(datetime.datetime(2040, 7, 1, tzinfo=zoneinfo.ZoneInfo(zone)).utcoffset())
print(len(zoneinfo.available_timezones()) > 500, attempt(open, '/usr/share/zoneinfo/UTC', 'w'))
",
        "-1 day, 20:00:00\n-1 day, 17:00:00\n5:45:00\nTrue EROFS\n",
    );
}

#[test]
fn files_last_as_long_as_their_session() {
    let mut session = python().session(&Limits::default()).unwrap();
    let mut step = |code: &str| session.step(&ExecRequest::new(code)).unwrap().stdout_text();
    step("open('x', 'w').write('kept')\nf = open('x')");
    assert_eq!(step("print(f.read(), open('x').read())"), "kept kept\n");
    prints("print(os.listdir())", "[]\n");
}

#[test]
fn a_full_file_system_is_an_error_of_the_program() {
    prints(
        "
big = open('big', 'wb', buffering=0)
written = 0
try:
    while True: written += big.write(b'x' * (1 << 20))
except OSError as e: print(60 << 20 < written < 65 << 20, errno.errorcode[e.errno])
print(attempt(open('small', 'wb', buffering=0).write, b'x'))
os.unlink('big'); big.close()
print(attempt(os.mkdir, 'd'), attempt(open('f', 'wb').truncate, 1 << 40))
with open('f', 'wb', buffering=0) as f:
    f.seek(1 << 62); print(attempt(f.write, b'x'))
count = 0
try:
    while True: os.symlink('t', f'd/{count}'); count += 1
except OSError as e: print(count > 10000, errno.errorcode[e.errno])
files = []
try:
    while True: files.append(open('f'))
except OSError as e: print(len(files) > 200, errno.errorcode[e.errno])
",
        "True ENOSPC\nENOSPC\nNone EFBIG\nEFBIG\nTrue ENOSPC\nTrue EMFILE\n",
    );
}

#[test]
fn files_count_as_memory() {
    let limits = Limits {
        memory: ByteSize::mib(64),
        ..Limits::default()
    };
    let code = "f = open('x', 'wb')\nwhile True: f.write(b'x' * (1 << 20))";
    let outcome = python().exec(&ExecRequest::new(code), &limits).unwrap();
    assert!(
        matches!(outcome.exit, Exit::OutOfMemory { .. }),
        "{}",
        outcome.exit
    );
    assert!(outcome.usage.memory_bytes <= 64 << 20);
}

#[test]
fn hostile_paths_stay_inside() {
    prints(
        "
print(attempt(open, '../../../../etc/passwd'), attempt(os.listdir, '/proc'), sorted(os.listdir('/../..')))
print(attempt(os.mkdir, 'x' * 300), attempt(os.mkdir, 'a/' * 5000), attempt(os.rename, '/', '/r'))
print(attempt(os.link, '/usr/share/zoneinfo/UTC', 'utc'), attempt(os.rename, '/usr', '/u'), attempt(os.chmod, '/dev', 0))
for fd in range(256):
    try: os.close(fd)
    except OSError: pass
os.mkdir('gone'); os.chdir('gone'); os.rmdir('/work/gone')
print(attempt(open, 'x', 'w'), attempt(os.listdir, '.'))
os.chdir('/work')
for depth in range(400): os.mkdir('deep'); os.chdir('deep')
print(os.getcwd().count('deep'), os.listdir('/work'))
",
        "ENOENT ENOENT ['dev', 'tmp', 'usr', 'work']\nENAMETOOLONG ENAMETOOLONG EBUSY\n\
         EXDEV EROFS EROFS\nENOENT ENOENT\n400 ['deep']\n",
    );
}
