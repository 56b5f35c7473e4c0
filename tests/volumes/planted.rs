//! What users have below a pod's volumes: trees of files, bound and mounted wherever the pod has a directory.

use std::collections::BTreeMap;
use std::fs;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::{MetadataExt, PermissionsExt, chown, symlink};
use std::path::{Path, PathBuf};

use nix::mount::{MntFlags, MsFlags, mount, umount2};

use crate::features::mounts_below;

/// Everything of a file that its user would miss.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Seen {
    /// Kind and permissions.
    mode: u32,
    owner: (u32, u32),
    modified: (i64, i64),
    /// Or where a link leads to.
    content: Vec<u8>,
}

/// Files and directories by their paths.
pub type Tree = BTreeMap<PathBuf, Seen>;

/// What is at and below a path, whatever is mounted there. Links are not followed.
pub fn look(root: &Path) -> Tree {
    let mut tree = Tree::new();
    let mut next = vec![root.to_owned()];
    while let Some(path) = next.pop() {
        let Ok(found) = fs::symlink_metadata(&path) else {
            continue;
        };
        let content = if found.is_symlink() {
            fs::read_link(&path).map(|to| to.as_os_str().as_bytes().to_vec())
        } else if found.is_file() {
            fs::read(&path)
        } else {
            Ok(Vec::new())
        };
        if found.is_dir() {
            let inside = fs::read_dir(&path).into_iter().flatten();
            next.extend(inside.flatten().map(|entry| entry.path()));
        }
        let seen = Seen {
            mode: found.mode(),
            owner: (found.uid(), found.gid()),
            modified: (found.mtime(), found.mtime_nsec()),
            content: content.unwrap_or_else(|error| error.to_string().into_bytes()),
        };
        tree.insert(path, seen);
    }
    tree
}

/// Fails when anything is gone, new or different.
#[track_caller]
pub fn assert_same(was: &Tree, is: &Tree, when: &str) {
    let different = differences(was, is);
    assert!(different.is_empty(), "{when}: {different:#?}");
}

/// What is gone, new or different, in words.
fn differences(was: &Tree, is: &Tree) -> Vec<String> {
    let told = |seen: Option<&Seen>| match seen {
        None => "nothing".to_owned(),
        Some(seen) => {
            let Seen {
                mode,
                owner,
                modified,
                content,
            } = seen;
            let begin = String::from_utf8_lossy(&content[..content.len().min(60)]);
            format!("{mode:o} {owner:?} {modified:?} {begin:?}")
        }
    };
    let gone = was
        .iter()
        .filter(|(path, seen)| is.get(*path) != Some(seen));
    let new = is.keys().filter(|path| !was.contains_key(*path));
    (gone.map(|(path, _)| path))
        .chain(new)
        .map(|path| {
            let (was, is) = (told(was.get(path)), told(is.get(path)));
            format!("{}: was {was}, is {is}", path.display())
        })
        .collect()
}

/// Dropped, it unmounts what is still mounted, so that removing the test's directory removes nothing else.
pub struct Planted {
    dir: PathBuf,
    mounts: Vec<PathBuf>,
    /// Where files are that have to stay as they are.
    roots: Vec<PathBuf>,
    /// As they were when they were sealed.
    sealed: Tree,
}

impl Planted {
    /// Users' own directory; nothing is planted yet.
    pub fn new(dir: &Path) -> Self {
        fs::create_dir_all(dir).expect("make the users' directory");
        Self {
            dir: dir.to_owned(),
            mounts: Vec::new(),
            roots: vec![dir.to_owned()],
            sealed: Tree::new(),
        }
    }

    /// Users' own directory.
    pub fn dir(&self) -> &Path {
        &self.dir
    }

    /// What is there as well has to stay as it is.
    pub fn watch(&mut self, root: &Path) {
        self.roots.push(root.to_owned());
    }

    /// A tree of users.
    pub fn tree(&self, name: &str) -> PathBuf {
        let root = self.dir.join(name);
        plant(&root);
        root
    }

    /// Binds a tree of users somewhere.
    pub fn bind(&mut self, name: &str, at: &Path) {
        let tree = self.tree(name);
        fs::create_dir_all(at).expect("make a mount point");
        bind(&tree, at);
        self.mounted(at);
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
        write(&file);
        fs::write(at, "").expect("make a mount point");
        bind(&file, at);
        self.mounted(at);
    }

    fn mounted(&mut self, at: &Path) {
        self.mounts.push(at.to_owned());
        self.roots.push(at.to_owned());
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
        self.mounted(at);
        plant(at);
    }

    /// A link to a tree of users.
    pub fn link(&self, name: &str, at: &Path) {
        let tree = self.tree(name);
        symlink(&tree, at).expect("make a link");
    }

    /// Mount points of users.
    pub fn mounts(&self) -> &[PathBuf] {
        &self.mounts
    }

    fn look(&self) -> Tree {
        self.roots.iter().flat_map(|root| look(root)).collect()
    }

    /// From now on everything stays as it is.
    pub fn seal(&mut self) {
        self.sealed = self.look();
        for root in &self.roots {
            assert!(self.sealed.contains_key(root), "{}", root.display());
        }
    }

    /// Fails when anything of users is gone, new or has changed, or is mounted no more.
    #[track_caller]
    pub fn assert_untouched(&self, when: &str) {
        assert!(!self.sealed.is_empty(), "not sealed");
        assert_same(&self.sealed, &self.look(), when);
        for at in &self.mounts {
            let there = mounts_below(at);
            assert!(
                there.iter().any(|m| Path::new(m) == at),
                "{when}: {}",
                at.display()
            );
        }
    }

    /// The user takes the mounts below a directory away again; what was mounted stays.
    pub fn unmount_below(&mut self, dir: &Path) {
        let (gone, kept) = std::mem::take(&mut self.mounts)
            .into_iter()
            .partition::<Vec<_>, _>(|at| at.starts_with(dir));
        self.mounts = kept;
        for at in gone.into_iter().rev() {
            let before = mounts_below(Path::new("/"));
            umount2(&at, MntFlags::empty()).expect("unmount what a user mounted");
            self.roots.retain(|root| *root != at);
            // What was seen through the mount, and through its copies; in a tmpfs it is gone with it.
            let after = mounts_below(Path::new("/"));
            for point in before.iter().filter(|point| !after.contains(point)) {
                self.sealed.retain(|path, _| !path.starts_with(point));
                if self.roots.iter().any(|r| Path::new(point).starts_with(r)) {
                    self.sealed.extend(look(Path::new(point)));
                }
            }
        }
    }

    /// The user takes all mounts away again.
    pub fn unmount(&mut self) {
        self.unmount_below(Path::new("/"));
    }
}

/// Files of a user, with modes and owners of all sorts.
pub fn plant(root: &Path) {
    write(&root.join("file"));
    write(&root.join("deep/er/file"));
    symlink("/etc", root.join("link")).expect("make a link");
    let of_nobody = root.join("deep/file");
    write(&of_nobody);
    chown(&of_nobody, Some(65534), Some(12)).expect("give a file away");
    fs::set_permissions(&of_nobody, fs::Permissions::from_mode(0o4640)).expect("set a mode");
}

fn write(path: &Path) {
    if let Some(parent) = path.parent() {
        fs::create_dir_all(parent).expect("make a user's directory");
    }
    let text = format!("written by a user as {}\n", path.display());
    fs::write(path, text).expect("write a user's file");
}

fn bind(from: &Path, at: &Path) {
    let none = None::<&str>;
    mount(Some(from), at, none, MsFlags::MS_BIND, none).expect("bind a user's files");
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

#[test]
fn a_change_of_any_kind_to_users_files_is_seen() {
    let dir = std::env::temp_dir().join(format!("hf-test-planted-{}", std::process::id()));
    let changes: [fn(&Path); 7] = [
        |tree| fs::remove_file(tree.join("deep/er/file")).unwrap(),
        |tree| fs::create_dir(tree.join("deep/new")).unwrap(),
        |tree| fs::write(tree.join("file"), "other").unwrap(),
        |tree| fs::set_permissions(tree, fs::Permissions::from_mode(0o700)).unwrap(),
        |tree| chown(tree.join("deep/er"), Some(1), None).unwrap(),
        |tree| {
            let file = fs::File::open(tree.join("file")).unwrap();
            file.set_modified(std::time::UNIX_EPOCH).unwrap();
        },
        |tree| {
            fs::remove_file(tree.join("link")).unwrap();
            symlink("/", tree.join("link")).unwrap();
        },
    ];
    for (n, change) in changes.into_iter().enumerate() {
        let tree = dir.join(n.to_string());
        plant(&tree);
        let was = look(&tree);
        assert_eq!(differences(&was, &look(&tree)), Vec::<String>::new());
        change(&tree);
        assert!(!differences(&was, &look(&tree)).is_empty(), "change {n}");
    }
    fs::remove_dir_all(dir).unwrap();
}
