//! What users have below a pod's volumes: trees of files, bound and mounted wherever the pod has a directory.

use std::collections::BTreeMap;
use std::fs;
use std::os::unix::fs::symlink;
use std::path::{Path, PathBuf};

use nix::mount::{MntFlags, MsFlags, mount, umount2};

use crate::features::mounts_below;

/// Dropped, it unmounts what is still mounted, so that removing the test's directory removes nothing else.
pub struct Planted {
    dir: PathBuf,
    mounts: Vec<PathBuf>,
    /// Every file with what is in it.
    files: BTreeMap<PathBuf, String>,
}

impl Planted {
    /// Users' own directory; nothing is planted yet.
    pub fn new(dir: &Path) -> Self {
        fs::create_dir_all(dir).expect("make the users' directory");
        Self {
            dir: dir.to_owned(),
            mounts: Vec::new(),
            files: BTreeMap::new(),
        }
    }

    /// Notes a file, made if it is not there, which has to stay as it is.
    pub fn file(&mut self, path: PathBuf) {
        if let Some(parent) = path.parent() {
            fs::create_dir_all(parent).expect("make a user's directory");
        }
        let text = format!("written by a user as {}\n", path.display());
        fs::write(&path, &text).expect("write a user's file");
        self.files.insert(path, text);
    }

    /// A tree of users.
    pub fn tree(&mut self, name: &str) -> PathBuf {
        let root = self.dir.join(name);
        self.file(root.join("file"));
        self.file(root.join("deep/er/file"));
        symlink("/etc", root.join("link")).expect("make a link");
        root
    }

    /// Binds a tree of users somewhere.
    pub fn bind(&mut self, name: &str, at: &Path) {
        let tree = self.tree(name);
        fs::create_dir_all(at).expect("make a mount point");
        mount(
            Some(&tree),
            at,
            None::<&str>,
            MsFlags::MS_BIND,
            None::<&str>,
        )
        .expect("bind a tree");
        self.mounted(&tree, at);
    }

    /// Has a mount share nothing: what users mount in it is there alone. Elsewhere it is a copy, which goes with the
    /// volume, of what stays where the volume comes from.
    pub fn set_apart(&self, at: &Path) {
        let none = None::<&str>;
        mount(none, at, none, MsFlags::MS_PRIVATE, none).expect("make a mount private");
    }

    /// Binds a single file of users somewhere.
    pub fn bind_file(&mut self, name: &str, at: &Path) {
        let file = self.dir.join(name);
        self.file(file.clone());
        fs::write(at, "").expect("make a mount point");
        mount(
            Some(&file),
            at,
            None::<&str>,
            MsFlags::MS_BIND,
            None::<&str>,
        )
        .expect("bind a file");
        let text = self.files[&file].clone();
        self.files.insert(at.to_owned(), text);
        self.mounts.push(at.to_owned());
    }

    fn mounted(&mut self, tree: &Path, at: &Path) {
        let inside: Vec<(PathBuf, String)> = self
            .files
            .iter()
            .filter_map(|(path, text)| {
                let below = path.strip_prefix(tree).ok()?;
                Some((at.join(below), text.clone()))
            })
            .collect();
        self.files.extend(inside);
        self.mounts.push(at.to_owned());
    }

    /// Mounts a tmpfs of users somewhere, with files.
    pub fn tmpfs(&mut self, at: &Path) {
        fs::create_dir_all(at).expect("make a mount point");
        mount(
            Some("tmpfs"),
            at,
            Some("tmpfs"),
            MsFlags::empty(),
            Some("size=1m,mode=0777"),
        )
        .expect("mount a tmpfs");
        self.mounts.push(at.to_owned());
        self.file(at.join("file"));
        self.file(at.join("deep/er/file"));
    }

    /// A link to a tree of users.
    pub fn link(&mut self, name: &str, at: &Path) {
        let tree = self.tree(name);
        symlink(&tree, at).expect("make a link");
    }

    /// Mount points of users.
    pub fn mounts(&self) -> &[PathBuf] {
        &self.mounts
    }

    /// Fails when anything of users has changed, or is mounted no more.
    #[track_caller]
    pub fn assert_untouched(&self, when: &str) {
        for (path, text) in &self.files {
            let found = fs::read_to_string(path);
            assert_eq!(
                found.ok().as_ref(),
                Some(text),
                "{when}: {}",
                path.display()
            );
        }
        for at in &self.mounts {
            let there = mounts_below(at);
            assert!(
                there.iter().any(|m| Path::new(m) == at),
                "{when}: {}",
                at.display()
            );
        }
    }

    /// The user takes the mounts away again; what was mounted stays.
    pub fn unmount(&mut self) {
        while let Some(at) = self.mounts.pop() {
            umount2(&at, MntFlags::empty()).expect("unmount what a user mounted");
            // Seen through the mount; in a tmpfs it is gone with it.
            self.files.retain(|path, _| !path.starts_with(&at));
        }
    }
}

impl Drop for Planted {
    fn drop(&mut self) {
        for at in self.mounts.iter().rev() {
            if let Err(error) = umount2(at, MntFlags::MNT_DETACH) {
                eprintln!("cannot unmount {}: {error}", at.display());
            }
        }
    }
}
