use rstest::rstest;

use super::*;

const READ: Access = Access {
    read: true,
    write: false,
    append: false,
};
const WRITE: Access = Access {
    read: true,
    write: true,
    append: false,
};
const CREATE: Opening = Opening {
    create: true,
    exclusive: false,
    truncate: false,
    folder: false,
};
const PLAIN: Opening = Opening {
    create: false,
    ..CREATE
};

/// A tree with a file of the host's in a folder that is sealed, and an open folder.
fn tree() -> Files {
    let mut host = tempfile::tempfile().unwrap();
    std::io::Write::write_all(&mut host, b"library").unwrap();
    let mut files = Files::new();
    files.mount(&["usr", "lib"], "zip", Arc::new(host)).unwrap();
    files.seal_all_but(&[&["tmp"]]);
    files
}

fn write(files: &mut Files, path: &str, bytes: &[u8]) -> Result<(), Errno> {
    let fd = files.open(ROOT, path, CREATE, WRITE, 5)?;
    let written = files.write(fd, None, bytes, 6);
    files.close(fd).unwrap();
    written
}

fn read(files: &mut Files, path: &str) -> Result<Vec<u8>, Errno> {
    let fd = files.open(ROOT, path, PLAIN, READ, 0)?;
    let mut buffer = [0; 100];
    let count = files.read(fd, None, &mut buffer)?;
    files.close(fd).unwrap();
    Ok(buffer[..count].to_vec())
}

fn names(files: &Files, path: &str) -> Vec<String> {
    let mut files = files.clone();
    let fd = files.open(ROOT, path, PLAIN, READ, 0).unwrap();
    let entries = files.entries_after(fd, 0).unwrap();
    entries.map(|(name, _)| name.to_owned()).collect()
}

#[test]
fn what_was_written_is_read() {
    let mut files = tree();
    write(&mut files, "tmp/a", b"text").unwrap();
    assert_eq!(read(&mut files, "tmp/../tmp/./a").unwrap(), b"text");
    let status = files.status(ROOT, "tmp/a").unwrap();
    assert_eq!(
        (status.kind, status.size, status.modified_ns),
        (Kind::File, 4, 6)
    );
}

#[test]
fn a_file_of_the_hosts_is_read_in_parts() {
    let mut files = tree();
    let fd = files.open(ROOT, "usr/lib/zip", PLAIN, READ, 0).unwrap();
    let mut buffer = [0; 4];
    assert_eq!(files.read(fd, None, &mut buffer), Ok(4));
    assert_eq!(files.read(fd, None, &mut buffer), Ok(3));
    assert_eq!(&buffer[..3], b"ary");
    assert_eq!(files.read(fd, None, &mut buffer), Ok(0));
    assert_eq!(files.read(fd, Some(1), &mut buffer), Ok(4));
    assert_eq!(&buffer, b"ibra");
    assert_eq!(files.read(fd, Some(u64::MAX), &mut buffer), Ok(0));
}

#[rstest]
#[case::writing("usr/lib/zip")]
#[case::adding("usr/lib/new")]
#[case::adding_at_the_root("new")]
fn what_is_sealed_stays(#[case] path: &str) {
    let mut files = tree();
    assert_eq!(write(&mut files, path, b"x"), Err(Errno::ReadOnly));
    assert_eq!(
        files.create_folder(ROOT, "usr/lib/folder", 0),
        Err(Errno::ReadOnly)
    );
    assert_eq!(files.remove_file(ROOT, "usr/lib/zip"), Err(Errno::ReadOnly));
    assert_eq!(files.remove_folder(ROOT, "tmp"), Err(Errno::ReadOnly));
    write(&mut files, "tmp/a", b"mine").unwrap();
    let onto = files.rename((ROOT, "tmp/a"), (ROOT, "usr/lib/zip"));
    assert_eq!(onto, Err(Errno::ReadOnly));
    let away = files.rename((ROOT, "usr/lib/zip"), (ROOT, "tmp/b"));
    assert_eq!(away, Err(Errno::ReadOnly));
    let truncate = Opening {
        truncate: true,
        ..PLAIN
    };
    assert_eq!(
        files.open(ROOT, "usr/lib/zip", truncate, READ, 0),
        Err(Errno::ReadOnly)
    );
    assert_eq!(read(&mut files, "usr/lib/zip").unwrap(), b"library");
}

#[rstest]
#[case("../../../etc/passwd", Errno::NotFound)]
#[case("tmp/none", Errno::NotFound)]
#[case("usr/lib/zip/x", Errno::NotAFolder)]
#[case("", Errno::NotFound)]
fn paths_do_not_lead_out(#[case] path: &str, #[case] expected: Errno) {
    assert_eq!(read(&mut tree(), path), Err(expected));
}

#[test]
fn above_the_root_is_the_root() {
    assert_eq!(names(&tree(), "../.."), ["tmp", "usr"]);
}

#[test]
fn long_names_are_refused() {
    let mut files = tree();
    let name = format!("tmp/{}", "n".repeat(MAX_NAME + 1));
    assert_eq!(write(&mut files, &name, b""), Err(Errno::NameTooLong));
    let path = "x/".repeat(MAX_PATH);
    assert_eq!(write(&mut files, &path, b""), Err(Errno::NameTooLong));
}

#[test]
fn space_is_bounded_and_comes_back() {
    let mut files = tree();
    let fd = files.open(ROOT, "tmp/a", CREATE, WRITE, 0).unwrap();
    files.set_size(fd, MAX_BYTES as u64, 0).unwrap();
    assert_eq!(
        files.write(fd, Some(MAX_BYTES as u64), b"x", 0),
        Err(Errno::NoSpace)
    );
    assert_eq!(files.set_size(fd, u64::MAX, 0), Err(Errno::NoSpace));
    assert_eq!(
        files.write(fd, Some(u64::MAX), b"x", 0),
        Err(Errno::TooLarge)
    );
    files.remove_file(ROOT, "tmp/a").unwrap();
    // It is there until it is closed.
    assert_eq!(write(&mut files, "tmp/b", b"x"), Err(Errno::NoSpace));
    files.close(fd).unwrap();
    write(&mut files, "tmp/b", b"x").unwrap();
}

#[test]
fn descriptors_and_files_are_bounded() {
    let mut files = tree();
    let opened = (0..MAX_OPEN)
        .map_while(|_| files.open(ROOT, "tmp/a", CREATE, WRITE, 0).ok())
        .count();
    assert_eq!(opened, MAX_OPEN - 1, "the root is open, too");
    assert_eq!(
        files.open(ROOT, "tmp/a", CREATE, WRITE, 0),
        Err(Errno::TooManyOpen)
    );
    let mut files = tree();
    let made = (0..MAX_NODES)
        .map_while(|index| files.create_folder(ROOT, &format!("tmp/{index}"), 0).ok())
        .count();
    assert!(made < MAX_NODES);
    assert_eq!(
        files.create_folder(ROOT, "tmp/more", 0),
        Err(Errno::NoSpace)
    );
}

#[test]
fn renaming_moves_and_replaces() {
    let mut files = tree();
    write(&mut files, "tmp/a", b"a").unwrap();
    write(&mut files, "tmp/b", b"b").unwrap();
    files.create_folder(ROOT, "tmp/folder", 0).unwrap();
    files.rename((ROOT, "tmp/a"), (ROOT, "tmp/b")).unwrap();
    assert_eq!(read(&mut files, "tmp/b").unwrap(), b"a");
    files
        .rename((ROOT, "tmp/b"), (ROOT, "tmp/folder/c"))
        .unwrap();
    assert_eq!(names(&files, "tmp"), ["folder"]);
    assert_eq!(
        files.rename((ROOT, "tmp/folder"), (ROOT, "tmp/folder/inside")),
        Err(Errno::Invalid)
    );
    assert_eq!(
        files.remove_folder(ROOT, "tmp/folder"),
        Err(Errno::NotEmpty)
    );
    files.remove_file(ROOT, "tmp/folder/c").unwrap();
    files.remove_folder(ROOT, "tmp/folder").unwrap();
    assert!(files.is_pristine());
}

#[test]
fn a_copy_is_independent() {
    let mut files = tree();
    write(&mut files, "tmp/a", b"before").unwrap();
    let mut copy = files.clone();
    write(&mut files, "tmp/a", b"after!").unwrap();
    assert_eq!(read(&mut copy, "tmp/a").unwrap(), b"before");
}

#[test]
fn what_is_left_behind_is_noticed() {
    let fresh = tree();
    let mut files = fresh.clone();
    assert!(files.is_pristine() && files.is_as_before(&fresh));
    let fd = files.open(ROOT, "usr/lib/zip", PLAIN, READ, 0).unwrap();
    assert!(
        !files.is_pristine() && !files.is_as_before(&fresh),
        "it is open"
    );
    files.close(fd).unwrap();
    assert!(files.is_pristine() && files.is_as_before(&fresh));
    write(&mut files, "tmp/a", b"").unwrap();
    assert!(
        !files.is_pristine() && !files.is_as_before(&fresh),
        "it is written"
    );
}
