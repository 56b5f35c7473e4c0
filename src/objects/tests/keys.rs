//! The key file: what it may say, who may read it, how it changes.

use std::fs;
use std::os::unix::fs::{PermissionsExt as _, symlink};
use std::path::Path;

use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;

use super::stamp;
use crate::objects::keyring::{CREDENTIAL, Key, KeyFile, KeyFileError, Keyring};
use crate::objects::vault::Vault;

fn mode(path: &Path) -> u32 {
    fs::metadata(path).unwrap().permissions().mode() & 0o7777
}

#[test]
fn a_file_is_made_private_and_the_same_keys_are_read_again() {
    let dir = tempfile::tempdir().unwrap();
    let file = KeyFile::locate(dir.path(), None, None);
    let made = file.create(stamp()).unwrap();
    assert_eq!(file.path(), dir.path().join("keys/secrets.key"));
    assert_eq!(mode(file.path()), 0o600);
    assert_eq!(mode(&dir.path().join("keys")), 0o700);
    let read = file.read().unwrap();
    assert_eq!(read.active().id(), made.active().id());
    assert_eq!(read.active().created(), "2023-11-14T22:13:20Z");
    // Whoever comes second gets the key of the first.
    assert_eq!(
        file.create(stamp()).unwrap().active().id(),
        made.active().id()
    );
    let left = fs::read_dir(dir.path().join("keys")).unwrap().count();
    assert_eq!(left, 1, "no drafts are left behind");
}

#[test]
fn a_key_shows_in_no_debug_output() {
    let dir = tempfile::tempdir().unwrap();
    let file = KeyFile::at(dir.path().join("k"));
    let ring = file.create(stamp()).unwrap();
    let text = fs::read_to_string(file.path()).unwrap();
    let secret = text.lines().last().unwrap().split(' ').nth(1).unwrap();
    let vault = Vault::with_keys(ring.clone());
    let shown = format!("{ring:?} {:?} {vault:?}", ring.active());
    assert!(!shown.contains(secret), "{shown}");
    let bytes = format!("{:?}", STANDARD.decode(secret).unwrap());
    assert!(!shown.contains(&bytes[1..20]), "{shown}");
}

#[test]
fn a_file_that_others_may_read_is_not_used() {
    let dir = tempfile::tempdir().unwrap();
    let file = KeyFile::at(dir.path().join("k"));
    file.create(stamp()).unwrap();
    for wrong in [0o644, 0o640, 0o620, 0o601] {
        fs::set_permissions(file.path(), fs::Permissions::from_mode(wrong)).unwrap();
        let error = file.read().unwrap_err();
        assert!(matches!(error, KeyFileError::Exposed { .. }), "{error}");
        assert!(error.to_string().contains("chmod 600"), "{error}");
        assert!(file.rotate(stamp()).is_err(), "and not changed");
    }
    let vault = Vault::open(file.clone(), stamp());
    assert!(vault.trouble().is_some() && vault.active().is_none());
    fs::set_permissions(file.path(), fs::Permissions::from_mode(0o400)).unwrap();
    assert!(vault.reload(), "it is used as soon as it is private");
    assert!(vault.trouble().is_none() && vault.active().is_some());
}

#[test]
fn wrong_lines_are_told_by_number_and_without_the_key() {
    let good = STANDARD.encode([7; 32]);
    let id = Keyring::parse(&format!("- {good} 2026-01-02T03:04:05Z"))
        .unwrap()
        .active()
        .id();
    let short = STANDARD.encode([7; 31]);
    let when = "2026-01-02T03:04:05Z";
    for (text, line, what) in [
        ("# nothing\n\n".to_owned(), 0, "no key"),
        (format!("# x\n{id} {good}\n"), 2, "three words"),
        (format!("{id} {good} {when} more\n"), 1, "three words"),
        (format!("{id} !!{good} {when}\n"), 1, "not base64"),
        (format!("{id} {short} {when}\n"), 1, "32 bytes"),
        (format!("12 {good} {when}\n"), 1, "16 hexadecimal"),
        (
            format!("0000000000000000 {good} {when}\n"),
            1,
            "does not belong",
        ),
        (format!("{id} {good} yesterday\n"), 1, "time"),
        (
            format!("{id} {good} {when}\n\n- {good} {when}\n"),
            3,
            "twice",
        ),
    ] {
        let error = Keyring::parse(&text).unwrap_err();
        assert_eq!(error.line, line, "{text}: {error}");
        assert!(error.to_string().contains(what), "{text}: {error}");
        assert!(!error.to_string().contains(&good), "{error}");
    }
    let ring = Keyring::parse(&format!("  # c\n\t{id}  {good}\t{when}  \n")).unwrap();
    assert_eq!(ring.iter().count(), 1);
}

#[test]
fn rotation_puts_a_key_on_top_and_keeps_comments_and_old_keys() {
    let dir = tempfile::tempdir().unwrap();
    let file = KeyFile::at(dir.path().join("k"));
    let first = file.create(stamp()).unwrap().active().id();
    let text = fs::read_to_string(file.path()).unwrap();
    fs::write(file.path(), format!("{text}# mine\n")).unwrap();
    let second = file.rotate(stamp()).unwrap().active().id();
    let third = file.rotate(stamp()).unwrap().active().id();
    let ids: Vec<_> = file.read().unwrap().iter().map(Key::id).collect();
    assert_eq!(ids, [third, second, first]);
    let text = fs::read_to_string(file.path()).unwrap();
    assert!(
        text.starts_with("# Keys for") && text.ends_with("# mine\n"),
        "{text}"
    );
    assert_eq!(mode(file.path()), 0o600);

    let error = file.remove(&[first, third]).unwrap_err();
    assert!(error.to_string().contains("active"), "{error}");
    let ids: Vec<_> = file
        .remove(&[second])
        .unwrap()
        .iter()
        .map(Key::id)
        .collect();
    assert_eq!(ids, [third, first]);
    assert!(file.remove(&[second]).is_err());
    assert!(
        fs::read_to_string(file.path())
            .unwrap()
            .ends_with("# mine\n")
    );
}

#[test]
fn old_keys_open_and_the_active_one_seals() {
    let dir = tempfile::tempdir().unwrap();
    let file = KeyFile::at(dir.path().join("k"));
    let vault = Vault::open(file.clone(), stamp());
    let old = vault.seal("t", "k", b"x").unwrap();
    assert!(!vault.reload(), "nothing changed");
    let active = file.rotate(stamp()).unwrap().active().id();
    assert!(vault.reload());
    assert_eq!(&**vault.unseal("t", "k", &old).unwrap(), b"x");
    let new = vault.seal("t", "k", b"x").unwrap();
    assert_eq!(crate::objects::vault::key_of(&new), Some(active));
    // A file that is broken or gone takes no key away.
    fs::write(file.path(), "garbage\n").unwrap();
    assert!(!vault.reload());
    assert!(vault.trouble().unwrap().contains("line 1"));
    assert!(vault.unseal("t", "k", &old).is_ok());
    fs::remove_file(file.path()).unwrap();
    assert!(!vault.reload());
    assert!(vault.unseal("t", "k", &old).is_ok());
}

#[test]
fn a_broken_file_is_not_written_over() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("k");
    fs::write(&path, "garbage\n").unwrap();
    fs::set_permissions(&path, fs::Permissions::from_mode(0o600)).unwrap();
    let vault = Vault::open(KeyFile::at(&path), stamp());
    assert!(vault.active().is_none());
    assert_eq!(fs::read_to_string(&path).unwrap(), "garbage\n");
}

#[test]
fn a_systemd_credential_wins_and_is_not_changed() {
    let dir = tempfile::tempdir().unwrap();
    let credentials = tempfile::tempdir().unwrap();
    let configured = dir.path().join("configured");
    let locate = || KeyFile::locate(dir.path(), Some(&configured), Some(credentials.path()));
    assert_eq!(locate().path(), configured, "without one the file counts");
    let source = KeyFile::at(dir.path().join("source"));
    let id = source.create(stamp()).unwrap().active().id();
    symlink(source.path(), credentials.path().join(CREDENTIAL)).unwrap();
    let file = locate();
    assert_eq!(file.read().unwrap().active().id(), id);
    let error = file.rotate(stamp()).unwrap_err();
    assert!(matches!(error, KeyFileError::Credential { .. }), "{error}");
}
