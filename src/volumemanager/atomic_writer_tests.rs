use super::*;

fn files(of: &[(&str, &str, u32)]) -> Files {
    of.iter()
        .map(|(path, data, mode)| {
            let file = File {
                data: data.as_bytes().to_vec(),
                mode: *mode,
                owner: None,
            };
            ((*path).to_owned(), file)
        })
        .collect()
}

/// Returns the files that a reader sees below a directory.
fn seen(dir: &Path) -> Files {
    let mut paths = BTreeSet::new();
    if dir.exists() {
        list(dir, "", &mut paths).unwrap();
    }
    paths
        .into_iter()
        .map(|path| {
            let at = dir.join(&path);
            let file = File {
                data: fs::read(&at).unwrap(),
                mode: fs::metadata(&at).unwrap().permissions().mode() & 0o7777,
                owner: None,
            };
            (path, file)
        })
        .collect()
}

fn names(dir: &Path) -> Vec<String> {
    let mut names: Vec<String> = fs::read_dir(dir)
        .unwrap()
        .map(|e| e.unwrap().file_name().into_string().unwrap())
        .collect();
    names.sort();
    names
}

fn old() -> Files {
    files(&[
        ("both", "old", 0o644),
        ("deep/gone", "x", 0o644),
        ("same", "same", 0o400),
    ])
}

fn new() -> Files {
    files(&[
        ("both", "new", 0o600),
        ("added/deep/er", "y", 0o755),
        ("same", "same", 0o400),
    ])
}

#[test]
fn names_lead_to_the_newest_content() {
    let dir = tempfile::tempdir().unwrap();
    let dir = dir.path();
    assert!(write(dir, &old(), None, 0).unwrap());
    assert_eq!(seen(&dir.join(DATA)), old());
    let first = names(dir);
    assert!(first[0].starts_with("..1970_01_01_00_00_00."), "{first:?}");
    assert_eq!(first[1..], ["..data", "both", "deep", "same"]);
    assert_eq!(
        fs::read_link(dir.join("deep")).unwrap(),
        Path::new("..data/deep")
    );

    assert!(
        !write(dir, &old(), None, 1_000).unwrap(),
        "nothing has changed"
    );
    assert_eq!(names(dir), first);

    assert!(write(dir, &new(), None, 1_000).unwrap());
    assert_eq!(seen(&dir.join(DATA)), new());
    assert_eq!(names(dir)[1..], ["..data", "added", "both", "same"]);
    assert_eq!(fs::read_to_string(dir.join("both")).unwrap(), "new");
    let mode = fs::metadata(dir.join("added/deep"))
        .unwrap()
        .permissions()
        .mode();
    assert_eq!(mode & 0o777, 0o755);

    assert!(write(dir, &Files::new(), None, 2_000).unwrap());
    assert_eq!(names(dir).len(), 2, "{:?}", names(dir));
}

#[test]
fn nothing_is_removed_through_a_mount_in_former_content() {
    use crate::volumemanager::stand_in::{Swept, can_mount};
    if !can_mount() {
        return;
    }
    let dir = tempfile::tempdir().unwrap();
    let _swept = Swept(dir.path().to_owned());
    let (volume, users) = (dir.path().join("volume"), dir.path().join("users"));
    fs::create_dir(&volume).unwrap();
    fs::create_dir(&users).unwrap();
    fs::write(users.join("precious"), "x").unwrap();
    write(&volume, &old(), None, 0).unwrap();
    let point = fs::canonicalize(volume.join("deep")).unwrap();
    let none: Option<&str> = None;
    let bind = nix::mount::MsFlags::MS_BIND;
    nix::mount::mount(Some(&users), &point, none, bind, none).unwrap();
    assert!(write(&volume, &new(), None, 1000).unwrap());
    assert!(users.join("precious").exists());
    assert_eq!(seen(&volume.join(DATA)), new());
    nix::mount::umount2(&point, nix::mount::MntFlags::empty()).unwrap();
    assert!(!write(&volume, &new(), None, 2000).unwrap());
    assert!(!point.exists() && users.join("precious").exists());
}

#[test]
fn content_that_somebody_changed_is_written_again() {
    let dir = tempfile::tempdir().unwrap();
    let dir = dir.path();
    type Change = fn(&Path);
    let changes: [Change; 4] = [
        |data| fs::write(data.join("both"), "odd").unwrap(),
        |data| fs::write(data.join("more"), "odd").unwrap(),
        |data| fs::remove_file(data.join("both")).unwrap(),
        |data| {
            fs::set_permissions(data.join("both"), fs::Permissions::from_mode(0o666)).unwrap();
        },
    ];
    for change in changes {
        write(dir, &old(), None, 0).unwrap();
        change(&dir.join(DATA));
        assert!(write(dir, &old(), None, 0).unwrap());
        assert_eq!(seen(&dir.join(DATA)), old());
    }
    fs::remove_file(dir.join("both")).unwrap();
    symlink("/etc/passwd", dir.join("both")).unwrap();
    write(dir, &old(), None, 0).unwrap();
    assert_eq!(fs::read_to_string(dir.join("both")).unwrap(), "old");
}

#[test]
fn cut_off_anywhere_a_reader_sees_the_old_set_or_the_new_one() {
    let mut cut = 0;
    let (mut saw_old, mut saw_new) = (false, false);
    loop {
        let dir = tempfile::tempdir().unwrap();
        let dir = dir.path();
        write(dir, &old(), None, 0).unwrap();
        let mut left = cut;
        let result = write_in_steps(dir, &new(), None, 1, &mut || {
            if left == 0 {
                return Err(io::Error::other("cut off"));
            }
            left -= 1;
            Ok(())
        });
        let seen_now = seen(&dir.join(DATA));
        assert!(
            seen_now == old() || seen_now == new(),
            "cut {cut}: {seen_now:?}"
        );
        saw_old |= seen_now == old();
        saw_new |= seen_now == new();
        // What is in both sets can be read under its name at every moment.
        assert_eq!(
            fs::read_to_string(dir.join("same")).unwrap(),
            "same",
            "cut {cut}"
        );
        assert!(["old", "new"].contains(&fs::read_to_string(dir.join("both")).unwrap().as_str()));
        let done = result.is_ok();
        // The next write, to the new set or back to the old one, leaves nothing over.
        for (next, tops) in [
            (new(), ["added", "both", "same"]),
            (old(), ["both", "deep", "same"]),
        ] {
            write(dir, &next, None, 2).unwrap();
            assert_eq!(seen(&dir.join(DATA)), next, "cut {cut}");
            assert_eq!(names(dir)[1], DATA, "cut {cut}");
            assert_eq!(names(dir)[2..], tops, "cut {cut}");
        }
        if done {
            break;
        }
        cut += 1;
    }
    assert!(cut >= 8 && saw_old && saw_new, "{cut} steps");
}

// --------------------------------------------------------------------------------- killed at any moment

const VICTIM: &str = "HOLDFAST_TEST_WRITER_DIR";

/// A version of which each file tells that it belongs to it. Some files come and go.
fn version(n: u32) -> Files {
    let text = format!("version {n}\n").repeat(2000);
    let of_turn = format!("turn-{}/file", n % 3);
    files(&[
        ("a", &text, 0o644),
        ("deep/er/b", &text, 0o640),
        (&of_turn, &text, 0o600),
        ("z", &text, 0o644),
    ])
}

/// Returns the version that a directory holds completely.
fn whole_version(data: &Path) -> Option<u32> {
    let seen = seen(data);
    let first = String::from_utf8(seen.get("a")?.data.clone()).ok()?;
    let n = first
        .lines()
        .next()?
        .strip_prefix("version ")?
        .parse()
        .ok()?;
    (seen == version(n)).then_some(n)
}

/// Writes until it is killed, when it is started as the victim of the test below.
#[test]
fn a_writer_that_is_killed() {
    let Some(dir) = std::env::var_os(VICTIM) else {
        return;
    };
    let dir = Path::new(&dir);
    let first = whole_version(&dir.join(DATA)).unwrap_or(0);
    for n in first + 1.. {
        write(dir, &version(n), None, i64::from(n)).unwrap();
    }
}

#[test]
fn killed_anywhere_readers_find_one_whole_version_and_the_next_write_leaves_nothing_over() {
    let base = tempfile::tempdir().unwrap();
    let dir = base.path();
    write(dir, &version(0), None, 0).unwrap();
    let name = "volumemanager::atomic_writer::tests::a_writer_that_is_killed";
    let (mut last, mut leftovers) = (0, 0);
    for round in 0..40_u32 {
        let mut victim = std::process::Command::new(std::env::current_exe().unwrap())
            .args(["--exact", name, "--nocapture"])
            .env(VICTIM, dir)
            .stdout(std::process::Stdio::null())
            .spawn()
            .unwrap();
        // It is killed after a few writes, at a moment that differs from round to round.
        let wanted = fs::read_link(dir.join(DATA)).unwrap();
        let mut patience = 300_000;
        // A link to be read is there at every moment.
        while fs::read_link(dir.join(DATA)).unwrap() == wanted {
            std::thread::sleep(std::time::Duration::from_micros(100));
            patience -= 1;
            assert!(patience > 0, "the victim writes nothing");
        }
        let until = std::time::Duration::from_micros(u64::from(round) * 137 % 3000);
        std::thread::sleep(until);
        victim.kill().unwrap();
        victim.wait().unwrap();

        let found = whole_version(&dir.join(DATA));
        let found = found.unwrap_or_else(|| panic!("round {round}: {:?}", seen(&dir.join(DATA))));
        assert!(found > last, "round {round}");
        let own = names(dir).into_iter().filter(|name| name.starts_with(".."));
        leftovers += usize::from(own.count() > 2);
        // The same content again cleans up as well, and writes nothing.
        if round % 2 == 0 {
            assert!(!write(dir, &version(found), None, 0).unwrap());
        } else {
            assert!(write(dir, &version(found + 1), None, 0).unwrap());
        }
        last = found + round % 2;
        assert_eq!(whole_version(&dir.join(DATA)), Some(last));
        let left = names(dir);
        assert_eq!(
            left[1..],
            ["..data", "a", "deep", &format!("turn-{}", last % 3), "z"]
        );
        for name in ["a", "deep/er/b", "z"] {
            assert!(
                fs::read_to_string(dir.join(name))
                    .unwrap()
                    .starts_with(&format!("version {last}\n"))
            );
        }
    }
    assert!(leftovers > 0, "no round was cut off between the steps");
}

// ------------------------------------------------------------------------------------------ any payload

fn any_payload() -> impl proptest::strategy::Strategy<Value = Files> {
    use proptest::prelude::*;
    let part = prop::sample::select(vec!["a", "b", "c.d", "...", "x y", "ü"]);
    let path = prop::collection::vec(part, 1..4).prop_map(|parts| parts.join("/"));
    let file = (prop::collection::vec(any::<u8>(), 0..64), 0_u32..0o1000);
    let all = prop::collection::btree_map(path, file, 0..6);
    all.prop_map(|all| {
        let mut files = Files::new();
        for (path, (data, mode)) in all {
            let below = |other: &String| {
                other.starts_with(&format!("{path}/")) || path.starts_with(&format!("{other}/"))
            };
            // The writer's own names and files below files are refused before.
            if path.starts_with("..") || files.keys().any(below) {
                continue;
            }
            let file = File {
                data,
                mode: mode | 0o400,
                owner: None,
            };
            files.insert(path, file);
        }
        files
    })
}

proptest::proptest! {
    #![proptest_config(proptest::prelude::ProptestConfig::with_cases(64))]

    #[test]
    fn whatever_was_there_before_the_newest_set_is_what_is_seen(
        sets in proptest::collection::vec(any_payload(), 1..5)
    ) {
        let base = tempfile::tempdir().unwrap();
        let dir = base.path();
        let mut before = None;
        for set in &sets {
            let written = write(dir, set, None, 0).unwrap();
            proptest::prop_assert_eq!(written, before != Some(set), "written only when it differs");
            proptest::prop_assert_eq!(&seen(&dir.join(DATA)), set);
            proptest::prop_assert!(!write(dir, set, None, 0).unwrap());
            let tops: BTreeSet<&str> = set.keys().map(|p| p.split('/').next().unwrap()).collect();
            let names = names(dir);
            let shown: BTreeSet<&str> = names
                .iter()
                .map(String::as_str)
                .filter(|n| *n != DATA && !n.starts_with("..1970"))
                .collect();
            proptest::prop_assert_eq!(shown, tops);
            proptest::prop_assert_eq!(names.iter().filter(|n| n.starts_with("..1970")).count(), 1);
            for (path, file) in set {
                proptest::prop_assert_eq!(&fs::read(dir.join(path)).unwrap(), &file.data);
            }
            before = Some(set);
        }
    }
}

#[test]
fn a_directory_that_stood_for_a_missing_key_gives_way_and_stops_no_other_name() {
    let dir = tempfile::tempdir().unwrap();
    let dir = dir.path();
    let all = files(&[("a", "x", 0o644), ("b", "y", 0o644), ("c", "z", 0o644)]);
    fs::create_dir(dir.join("b")).unwrap();
    assert!(write(dir, &all, None, 0).unwrap());
    assert_eq!(fs::read(dir.join("b")).unwrap(), b"y");

    let other = tempfile::tempdir().unwrap();
    let other = other.path();
    fs::create_dir_all(other.join("b/of/a/user")).unwrap();
    let error = write(other, &all, None, 0).unwrap_err().to_string();
    assert!(error.contains("\"b\" is there"), "{error}");
    assert_eq!(fs::read(other.join("a")).unwrap(), b"x");
    assert_eq!(fs::read(other.join("c")).unwrap(), b"z");
}
