use proptest::prelude::*;

use super::*;
use crate::actor::User;

fn file(bytes: &[u8]) -> Entry {
    Entry::File {
        bytes: bytes.to_vec(),
        executable: false,
    }
}

fn link(target: &str) -> Entry {
    Entry::Link {
        target: target.into(),
    }
}

fn sample() -> FileTree {
    let mut tree = FileTree::new();
    let long = format!("deep/{}/{}", "a".repeat(90), "b".repeat(120));
    for (path, entry) in [
        ("deep", Entry::Folder),
        (long.as_str(), file(&[7; 1000])),
        ("empty", file(b"")),
        ("exactly", file(&[1; 512])),
        ("away", link("/etc/passwd")),
        ("far", link(&"x/".repeat(100))),
    ] {
        tree.insert(path, entry).unwrap();
    }
    let script = Entry::File {
        bytes: b"#!/bin/sh\n".to_vec(),
        executable: true,
    };
    tree.insert("run.sh", script).unwrap();
    tree
}

fn from_tar(archive: &[u8]) -> Result<FileTree, ActorError> {
    FileTree::from_tar(archive, Path::new(""), TreeLimits::default())
}

#[test]
fn archives_give_back_what_went_in() {
    let tree = sample();
    let owner = User {
        uid: 1000,
        gid: 3_000_000,
    };
    assert_eq!(from_tar(&tree.to_tar(owner)).unwrap(), tree);
}

#[test]
fn gnu_tar_writes_and_reads_the_same() {
    let folder = tempfile::tempdir().unwrap();
    let tree = sample();
    let archive = folder.path().join("in.tar");
    fs::write(&archive, tree.to_tar(User::default())).unwrap();
    let inside = folder.path().join("inside");
    fs::create_dir(&inside).unwrap();
    let run = |arguments: &[&str]| {
        let output = std::process::Command::new("tar")
            .args(arguments)
            .current_dir(&inside)
            .output()
            .unwrap();
        assert!(output.status.success(), "{output:?}");
        output.stdout
    };
    run(&["--no-same-owner", "-xpf", archive.to_str().unwrap()]);
    let parents = |tree: &FileTree| {
        let mut tree = tree.clone();
        let long = format!("deep/{}", "a".repeat(90));
        tree.insert(long, Entry::Folder).unwrap();
        tree
    };
    assert_eq!(
        FileTree::read_from(&inside, TreeLimits::default()).unwrap(),
        parents(&tree)
    );
    for format in ["gnu", "posix", "ustar"] {
        // Names of 120 bytes are too long for ustar.
        let only = if format == "ustar" { "run.sh" } else { "." };
        let archive = run(&["--format", format, "-cf", "-", only]);
        let read = from_tar(&archive).unwrap();
        match format {
            "ustar" => assert_eq!(read.get("run.sh"), tree.get("run.sh")),
            _ => assert_eq!(read, parents(&tree), "{format}"),
        }
    }
    let archive = run(&["-cf", "-", "deep"]);
    let read = FileTree::from_tar(&archive, Path::new("deep"), TreeLimits::default()).unwrap();
    assert_eq!(read.len(), 2);
    // What was not asked for is refused.
    FileTree::from_tar(&archive, Path::new("dee"), TreeLimits::default()).unwrap_err();
}

/// An archive of one entry, with any name.
fn archive_of(name: &str, kind: u8, link: &str, content: &[u8]) -> Vec<u8> {
    let mut tree = FileTree::new();
    tree.entries.insert("x".into(), file(content));
    let mut archive = tree.to_tar(User::default());
    archive[..100].fill(0);
    archive[..name.len()].copy_from_slice(name.as_bytes());
    archive[156] = kind;
    archive[157..157 + link.len()].copy_from_slice(link.as_bytes());
    mend_sum(&mut archive);
    archive
}

fn mend_sum(archive: &mut [u8]) {
    archive[148..156].fill(b' ');
    let sum: u64 = archive[..512].iter().map(|byte| u64::from(*byte)).sum();
    archive[148..155].copy_from_slice(format!("{sum:06o}\0").as_bytes());
}

#[test]
fn hostile_archives_are_refused() {
    from_tar(&archive_of("plain", b'0', "", b"x")).unwrap();
    for (name, kind, link, reason) in [
        ("../out", b'0', "", "leads out of it"),
        ("a/../../out", b'0', "", "leads out of it"),
        ("/etc/passwd", b'0', "", "leads out of it"),
        ("hard", b'1', "/etc/shadow", "leads out of it"),
        ("hard", b'1', "missing", "which is no file before it"),
        ("sparse", b'S', "", "an entry of kind 83"),
    ] {
        let error = from_tar(&archive_of(name, kind, link, b"")).unwrap_err();
        assert!(error.to_string().contains(reason), "{name}: {error}");
        assert!(error.is_guests_doing());
    }
    assert!(
        from_tar(&archive_of("device", b'3', "", b""))
            .unwrap()
            .is_empty(),
        "devices are left out"
    );
}

#[test]
fn nothing_is_written_through_a_link() {
    let mut tree = FileTree::new();
    tree.insert("away", link("/tmp")).unwrap();
    let error = tree.insert("away/file", file(b"x")).unwrap_err();
    assert!(
        error.to_string().contains("inside of what is no folder"),
        "{error}"
    );
    tree.insert("folder/file", file(b"x")).unwrap();
    tree.insert("folder", link("/tmp")).unwrap_err();

    let folder = tempfile::tempdir().unwrap();
    let out = folder.path().join("out");
    sample().write_to(&out).unwrap();
    assert!(!out.join("away").is_symlink());
    assert_eq!(fs::read(out.join("run.sh")).unwrap(), b"#!/bin/sh\n");
    // A folder that is there is left alone.
    tree.write_to(&out).unwrap_err();
}

#[test]
fn sizes_are_compared_with_what_is_there() {
    let mut archive = archive_of("huge", b'0', "", b"x");
    archive[124..135].copy_from_slice(b"77777777777");
    mend_sum(&mut archive);
    let error = from_tar(&archive).unwrap_err();
    assert!(
        error.to_string().contains("in the middle of a file"),
        "{error}"
    );
    archive[124..136].copy_from_slice(&[0x80, 0, 0, 0, 255, 255, 255, 255, 255, 255, 255, 255]);
    mend_sum(&mut archive);
    from_tar(&archive).unwrap_err();

    let tree = sample();
    let archive = tree.to_tar(User::default());
    let few = TreeLimits {
        entries: 3,
        ..TreeLimits::default()
    };
    let error = FileTree::from_tar(&archive, Path::new(""), few).unwrap_err();
    assert_eq!(error.to_string(), "the tree has more than 3 entries");
    let small = TreeLimits {
        bytes: 1000,
        ..TreeLimits::default()
    };
    let error = FileTree::from_tar(&archive, Path::new(""), small).unwrap_err();
    assert_eq!(error.to_string(), "the tree has more than 1000 bytes");
}

proptest::proptest! {
    #[test]
    fn damaged_archives_are_read_or_refused(
        at in 0_usize..4096, byte in proptest::num::u8::ANY, length in 0_usize..8192, mend in proptest::bool::ANY,
    ) {
        let mut archive = sample().to_tar(User::default());
        let at = at % archive.len();
        archive[at] = byte;
        if mend && at < 512 {
            mend_sum(&mut archive);
        }
        archive.truncate(length);
        let _ = from_tar(&archive);
    }
}

#[test]
fn the_seeds_of_the_fuzz_target_are_read() {
    let folder = concat!(env!("CARGO_MANIFEST_DIR"), "/fuzz/seeds/actor_archive");
    let write = std::env::var_os("WARDIAN_WRITE_SEEDS").is_some();
    if write {
        fs::create_dir_all(folder).unwrap();
        let mut small = FileTree::new();
        small.insert("folder", Entry::Folder).unwrap();
        small.insert("folder/file", file(b"text")).unwrap();
        let far = format!("folder/{}", "x/".repeat(100));
        small.insert("folder/far", link(&far)).unwrap();
        fs::write(format!("{folder}/small"), small.to_tar(User::default())).unwrap();
        let mut linked = FileTree::of_file("file", "text")
            .unwrap()
            .to_tar(User::default());
        linked.truncate(1024);
        linked.extend(archive_of("again", b'1', "file", b""));
        fs::write(format!("{folder}/hard_link"), linked).unwrap();
        let record = b"30 path=a/name/of/posix/files\n";
        let mut extended = archive_of("header", b'x', "", record);
        extended.truncate(1024);
        extended.extend(archive_of("short", b'0', "", b"text"));
        fs::write(format!("{folder}/extended"), extended).unwrap();
    }
    let mut names = Vec::new();
    for seed in fs::read_dir(folder).unwrap() {
        let seed = fs::read(seed.unwrap().path()).unwrap();
        fuzz_archive(&seed);
        names.extend(from_tar(&seed).unwrap().entries.into_keys());
    }
    names.sort();
    let expected = [
        "a/name/of/posix/files",
        "again",
        "file",
        "folder",
        "folder/far",
        "folder/file",
    ];
    assert_eq!(names, expected.map(PathBuf::from));
}

proptest! {
    #[test]
    fn any_archive_is_read_or_refused(
        names in proptest::collection::vec(("[a/.]{0,4}", "[0-7xLKg]", "[a/.]{0,3}"), 0..6),
        flips in proptest::collection::vec((any::<prop::sample::Index>(), any::<u8>()), 0..4),
    ) {
        let mut archive = Vec::new();
        for (name, kind, link) in &names {
            let entry = archive_of(name, kind.as_bytes()[0], link, b"12 path=abc\n");
            archive.extend_from_slice(&entry[..1024]);
        }
        archive.extend_from_slice(&[0; 1024]);
        fuzz_archive(&archive);
        for (place, byte) in flips {
            let at = place.index(archive.len());
            archive[at] = byte;
        }
        fuzz_archive(&archive);
    }
}
