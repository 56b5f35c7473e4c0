//! The kernel's table of mounts, `/proc/self/mountinfo`, as bytes: paths and sources need not be UTF-8.

use std::ffi::OsString;
use std::os::unix::ffi::OsStringExt as _;
use std::path::PathBuf;

/// Path of the table.
pub const TABLE: &str = "/proc/self/mountinfo";

/// A line of the table. Fields are as the kernel wrote them; [`path`] and [`text`] undo its escapes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Line<'a> {
    /// Number of the mount.
    pub id: &'a [u8],
    /// Number of the mount that it is mounted on.
    pub parent: &'a [u8],
    /// `major:minor` of the file system.
    pub device: &'a [u8],
    /// Directory of the file system that is mounted.
    pub root: &'a [u8],
    /// Mount point.
    pub point: &'a [u8],
    /// Options of the mount.
    pub options: &'a [u8],
    /// `shared:N`, `master:N` and others, separated by blanks.
    pub tags: &'a [u8],
    /// File system type.
    pub fstype: &'a [u8],
    /// Device, `server:path`, or another name of the file system.
    pub source: &'a [u8],
    /// Options of the file system.
    pub super_options: &'a [u8],
}

/// Returns the lines of a table. Lines of another form are left out.
pub fn lines(table: &[u8]) -> impl Iterator<Item = Line<'_>> {
    table.split(|byte| *byte == b'\n').filter_map(line)
}

fn line(line: &[u8]) -> Option<Line<'_>> {
    let mut rest = line;
    let mut next = || {
        let end = rest.iter().position(|byte| *byte == b' ');
        let field = &rest[..end.unwrap_or(rest.len())];
        rest = end.map_or(&[], |end| &rest[end + 1..]);
        (!field.is_empty()).then_some(field)
    };
    let [id, parent, device, root, point, options] =
        [next()?, next()?, next()?, next()?, next()?, next()?];
    // The tags end with a field of one dash.
    let mut tags = rest;
    let (tags, after) = loop {
        let end = tags.iter().position(|byte| *byte == b' ')?;
        if &tags[..end] == b"-" {
            let length = rest.len() - tags.len();
            break (&rest[..length.saturating_sub(1)], &tags[end + 1..]);
        }
        tags = &tags[end + 1..];
    };
    let mut fields = after.splitn(3, |byte| *byte == b' ');
    Some(Line {
        id,
        parent,
        device,
        root,
        point,
        options,
        tags,
        fstype: fields.next()?,
        source: fields.next()?,
        super_options: fields.next()?,
    })
}

/// A field as a path.
pub fn path(field: &[u8]) -> PathBuf {
    PathBuf::from(OsString::from_vec(unescape(field)))
}

/// A field as text for people; bytes that are no UTF-8 are replaced.
pub fn text(field: &[u8]) -> String {
    String::from_utf8_lossy(&unescape(field)).into_owned()
}

/// The kernel writes spaces, tabs, line feeds and backslashes as `\` and three octal digits.
fn unescape(field: &[u8]) -> Vec<u8> {
    let mut out = Vec::with_capacity(field.len());
    let mut rest = field;
    while let [first, tail @ ..] = rest {
        let digits = tail
            .get(..3)
            .filter(|d| d.iter().all(|b| (b'0'..=b'7').contains(b)));
        match digits {
            Some(digits) if *first == b'\\' => {
                let value = digits
                    .iter()
                    .fold(0_u32, |v, d| v * 8 + u32::from(d - b'0'));
                out.push(u8::try_from(value & 0xff).unwrap_or(b'?'));
                rest = &tail[3..];
            }
            _ => {
                out.push(*first);
                rest = tail;
            }
        }
    }
    out
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lines_have_their_fields_whatever_bytes_are_in_them() {
        let table = b"33 31 0:30 / /sys/fs/cgroup/cpu,cpuacct rw,relatime shared:9 master:2 - cgroup cgroup rw,cpu,cpuacct\n\
            garbage\n\
            34 31 8:1 /a /mnt/caf\xe9\\040x rw - ext4 /dev/\xe9 rw\n\
            35 31 8:1 / /mnt/none rw,ro - tmpfs  rw\n";
        let all: Vec<Line<'_>> = lines(table).collect();
        assert_eq!(all.len(), 3, "{all:?}");
        assert_eq!(
            (all[0].point, all[0].tags, all[0].fstype),
            (
                &b"/sys/fs/cgroup/cpu,cpuacct"[..],
                &b"shared:9 master:2"[..],
                &b"cgroup"[..]
            )
        );
        assert_eq!(all[0].super_options, b"rw,cpu,cpuacct");
        assert_eq!(
            path(all[1].point),
            PathBuf::from(OsString::from_vec(b"/mnt/caf\xe9 x".to_vec()))
        );
        assert_eq!(all[1].tags, b"");
        assert_eq!(text(all[1].source), "/dev/\u{fffd}");
        assert_eq!(all[2].source, b"", "a source may be empty");
    }
}
