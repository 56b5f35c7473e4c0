//! Writes the files of a volume so that a reader sees all of the old content or all of the new; upstream's
//! `AtomicWriter`.
//!
//! On disk: the files lie in `..<time>.<random>`; `..data` is a link to that directory; `<name>` is a link
//! to `..data/<name>`. New content is written beside the old, then `..data_tmp` is renamed onto `..data`.
//!
//! **Invariant:** `..data` always leads to a complete set, whenever the writer is cut off; the next write
//! removes what is left over.

use std::collections::BTreeSet;
use std::ffi::{OsStr, OsString};
use std::fs;
use std::io;
use std::os::unix::fs::{MetadataExt, OpenOptionsExt, PermissionsExt, symlink};
use std::path::Path;

use super::ownership::{self, Access, ChangePolicy};
use super::payload::{File, Files};
use super::safety;

const DATA: &str = "..data";
const DATA_TMP: &str = "..data_tmp";

/// Makes `dir` hold `files`, named after the time `wall_ms`, and all new belong to `group`, root's when
/// `None`. Returns whether anything was written.
///
/// # Errors
/// When the file system refuses; the old content is still there then.
pub(super) fn write(
    dir: &Path,
    files: &Files,
    group: Option<u32>,
    wall_ms: i64,
) -> io::Result<bool> {
    let written = write_in_steps(dir, files, group, wall_ms, &mut || Ok(()));
    if written.is_err() {
        // What was begun takes space that the next try needs. The first error is the one to tell.
        drop(current(dir).and_then(|name| sweep(dir, name.as_deref(), &mut || Ok(()))));
    }
    written
}

/// `step` is called before each change; its error cuts the writer off there.
fn write_in_steps(
    dir: &Path,
    files: &Files,
    group: Option<u32>,
    wall_ms: i64,
    step: &mut dyn FnMut() -> io::Result<()>,
) -> io::Result<bool> {
    let current = current(dir)?;
    let same = match &current {
        Some(name) => holds(&dir.join(name), files)?,
        None => false,
    };
    if same {
        link_names(dir, files, step)?;
        sweep(dir, current.as_deref(), step)?;
        return Ok(false);
    }
    // Left by a writer that was cut off; it may take the space that is needed now.
    sweep(dir, current.as_deref(), step)?;
    step()?;
    let fresh = tempfile::Builder::new()
        .prefix(&prefix(wall_ms))
        .rand_bytes(10)
        .tempdir_in(dir)?
        .keep();
    let name = fresh
        .file_name()
        .map(OsStr::to_owned)
        .ok_or_else(|| io::Error::other("a directory without a name"))?;
    fs::set_permissions(&fresh, fs::Permissions::from_mode(0o755))?;
    for (path, file) in files {
        step()?;
        write_file(&fresh, path, file)?;
    }
    if let Some(group) = group {
        step()?;
        ownership::give(&fresh, group, Access::ReadOnly, ChangePolicy::Always)?;
    }
    step()?;
    symlink(&name, dir.join(DATA_TMP))?;
    step()?;
    fs::rename(dir.join(DATA_TMP), dir.join(DATA))?;
    link_names(dir, files, step)?;
    sweep(dir, Some(&name), step)?;
    Ok(true)
}

/// Returns whether a set was written into a directory.
pub(super) fn is_written(dir: &Path) -> bool {
    current(dir).is_ok_and(|name| name.is_some())
}

/// The directory `..data` leads to.
fn current(dir: &Path) -> io::Result<Option<OsString>> {
    let target = match fs::read_link(dir.join(DATA)) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(None),
        other => other?.into_os_string(),
    };
    let text = target.to_string_lossy();
    let own = text.starts_with("..") && text.len() > 2 && !text.contains('/');
    Ok((own && dir.join(&target).is_dir()).then_some(target))
}

fn prefix(wall_ms: i64) -> String {
    let time = jiff::Timestamp::from_millisecond(wall_ms).unwrap_or_default();
    time.strftime("..%Y_%m_%d_%H_%M_%S.").to_string()
}

fn write_file(base: &Path, path: &str, content: &File) -> io::Result<()> {
    let mut dir = base.to_owned();
    let (parents, name) = path.rsplit_once('/').unwrap_or(("", path));
    for part in parents.split('/').filter(|p| !p.is_empty()) {
        dir.push(part);
        match fs::create_dir(&dir) {
            Err(error) if error.kind() == io::ErrorKind::AlreadyExists => {}
            other => {
                other?;
                fs::set_permissions(&dir, fs::Permissions::from_mode(0o755))?;
            }
        }
    }
    // Nobody else reads it before its mode is what it should be.
    let mut file = fs::OpenOptions::new()
        .write(true)
        .create_new(true)
        .mode(0o600)
        .open(dir.join(name))?;
    io::Write::write_all(&mut file, &content.data)?;
    if content.owner.is_some() {
        std::os::unix::fs::fchown(&file, content.owner, None)?;
    }
    file.set_permissions(fs::Permissions::from_mode(content.mode))
}

/// Returns whether a directory has exactly these files with these modes.
fn holds(dir: &Path, files: &Files) -> io::Result<bool> {
    let mut found = BTreeSet::new();
    list(dir, "", &mut found)?;
    if !found.iter().eq(files.keys()) {
        return Ok(false);
    }
    for (path, file) in files {
        let path = dir.join(path);
        let metadata = fs::symlink_metadata(&path)?;
        let same = metadata.is_file()
            && metadata.permissions().mode() & 0o7777 == file.mode
            && file.owner.is_none_or(|owner| owner == metadata.uid())
            && metadata.len() == file.data.len() as u64
            && fs::read(&path)? == file.data;
        if !same {
            return Ok(false);
        }
    }
    Ok(true)
}

fn list(dir: &Path, prefix: &str, found: &mut BTreeSet<String>) -> io::Result<()> {
    for entry in fs::read_dir(dir)? {
        let entry = entry?;
        let path = format!("{prefix}{}", entry.file_name().to_string_lossy());
        if entry.file_type()?.is_dir() {
            list(&entry.path(), &format!("{path}/"), found)?;
        } else {
            found.insert(path);
        }
    }
    Ok(())
}

/// Makes the links that users see, and removes those whose files are gone.
fn link_names(
    dir: &Path,
    files: &Files,
    step: &mut dyn FnMut() -> io::Result<()>,
) -> io::Result<()> {
    let wanted: BTreeSet<&str> = files
        .keys()
        .filter_map(|path| path.split('/').next())
        .collect();
    let mut taken = None;
    for name in &wanted {
        let (link, target) = (dir.join(name), Path::new(DATA).join(name));
        match fs::read_link(&link) {
            Ok(found) if found == target => continue,
            Ok(_) => {
                step()?;
                fs::remove_file(&link)?;
            }
            Err(error) if error.kind() == io::ErrorKind::NotFound => {}
            // A directory that stood for a `subPath` while the object had no such key.
            Err(error) if error.kind() == io::ErrorKind::InvalidInput => {
                if let Err(error) = fs::remove_dir(&link) {
                    let text = format!("{name:?} is there, and is not a link of ours; remove it");
                    tracing::debug!(path = %link.display(), %error, "cannot replace it by a link");
                    taken = Some(io::Error::new(io::ErrorKind::AlreadyExists, text));
                    continue;
                }
            }
            Err(error) => return Err(error),
        }
        step()?;
        symlink(&target, &link)?;
    }
    for entry in fs::read_dir(dir)? {
        let entry = entry?;
        let name = entry.file_name();
        let name = name.to_string_lossy();
        let stale = !name.starts_with("..") && !wanted.contains(&*name);
        if stale && entry.file_type()?.is_symlink() {
            step()?;
            fs::remove_file(entry.path())?;
        }
    }
    // The other names are there all the same.
    taken.map_or(Ok(()), Err)
}

/// Removes directories and links of the writer's that `..data` does not need, and nothing through a mount.
fn sweep(
    dir: &Path,
    keep: Option<&OsStr>,
    step: &mut dyn FnMut() -> io::Result<()>,
) -> io::Result<()> {
    for entry in fs::read_dir(dir)? {
        let entry = entry?;
        let name = entry.file_name();
        let own = name.to_string_lossy().starts_with("..");
        if !own || Some(name.as_os_str()) == keep || name == DATA {
            continue;
        }
        step()?;
        if entry.file_type()?.is_dir() {
            match safety::remove_tree(&entry.path()) {
                Err(error) if error.kind() == io::ErrorKind::ResourceBusy => {
                    // Teardown tells users of it; newer content does not wait for that.
                    tracing::warn!(%error, "former content of a volume stays");
                }
                other => other?,
            }
        } else {
            fs::remove_file(entry.path())?;
        }
    }
    Ok(())
}

#[cfg(test)]
#[path = "atomic_writer_tests.rs"]
mod tests;
