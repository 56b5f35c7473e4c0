use std::fs;

use super::*;
use crate::volumemanager::stand_in::StandIns;

#[tokio::test]
async fn a_tool_gets_its_arguments_and_a_bare_environment() {
    let tools = StandIns::new(&[]);
    tools.script("probe", "env | sort; echo complaint >&2; pwd");
    let call = Call::new("probe")
        .flags(["-t", "nfs"])
        .data("what", "a b; $(touch /tmp/never) 'c'")
        .path(Path::new("/mnt/-x"));
    let output = tools.tools().run(call).await.unwrap();
    assert_eq!(output.code, Some(0));
    assert_eq!(
        tools.calls(),
        ["probe -t nfs a b; $(touch /tmp/never) 'c' /mnt/-x"],
        "no shell has looked at it"
    );
    assert_eq!(output.stderr, "complaint\n");
    let mut lines: Vec<_> = output.stdout.lines().collect();
    assert_eq!(lines.pop(), Some("/"));
    // The shell adds PWD and _.
    let own = |l: &&str| !l.starts_with("PWD=") && !l.starts_with("_=") && !l.starts_with("SHLVL=");
    let lines: Vec<_> = lines.into_iter().filter(own).collect();
    assert_eq!(
        lines,
        ["LANG=C", "LC_ALL=C", "PATH=/usr/sbin:/usr/bin:/sbin:/bin"]
    );
}

#[tokio::test]
async fn what_users_write_is_never_an_option() {
    let tools = StandIns::new(&["mount"]);
    for (value, why) in [
        ("-o", "begins with"),
        ("--bind", "begins with"),
        ("", "empty"),
        ("a\nb", "line feed"),
        ("a\0b", "NUL"),
    ] {
        let call = Call::new("mount").data("server", value);
        let error = tools.tools().run(call).await.unwrap_err();
        assert!(
            error.took_no_effect() && error.to_string().contains(why),
            "{error}"
        );
    }
    let relative = Call::new("mount").path(Path::new("x"));
    assert!(
        tools
            .tools()
            .run(relative)
            .await
            .unwrap_err()
            .took_no_effect()
    );
    assert_eq!(tools.calls(), [""; 0], "nothing was started");
}

#[tokio::test]
async fn a_tool_that_is_missing_is_named_with_its_package() {
    let tools = StandIns::new(&[]);
    fs::write(tools.path("iscsiadm"), "not a program").unwrap();
    let error = tools.tools().run(Call::new("iscsiadm")).await.unwrap_err();
    let text = error.to_string();
    assert!(text.starts_with("iscsiadm is not installed"), "{text}");
    assert!(text.ends_with("by the package open-iscsi"), "{text}");
    let path = tools.tools().run(Call::new("../bin/sh")).await.unwrap_err();
    assert!(matches!(path, CommandError::Missing { .. }), "{path}");
}

// Invariant VOL-11.
#[tokio::test]
async fn a_failure_tells_what_the_tool_said_but_no_secret() {
    let tools = StandIns::new(&[]);
    tools.script("iscsiadm", "echo \"cannot: $2\" >&2; echo out; exit 6");
    let call = Call::new("iscsiadm")
        .flags(["-v"])
        .secret("password", "-hunter2");
    let error = tools.tools().succeed(call).await.unwrap_err();
    assert_eq!(
        error.to_string(),
        "iscsiadm -v *** failed (exit status: 6): cannot: ***"
    );
    assert!(!format!("{error:?}").contains("hunter2"));
    assert_eq!(tools.calls(), ["iscsiadm -v -hunter2"]);
}

#[tokio::test]
async fn output_without_end_is_cut_and_never_stops_the_tool() {
    let tools = StandIns::new(&[]);
    tools.script("chatty", "head -c 1000000 /dev/zero | tr '\\0' x; echo end");
    let output = tools.tools().run(Call::new("chatty")).await.unwrap();
    assert_eq!(output.stdout.len(), OUTPUT);
    assert!(output.stdout.ends_with("xend\n"));
}

#[tokio::test]
async fn a_tool_that_hangs_is_killed_with_all_it_started() {
    let tools = StandIns::new(&[]);
    let pid = tools.path("pid");
    // The child holds the pipe, as mount.nfs does below mount.
    tools.script(
        "hang",
        &format!("sleep 1000 & echo $! > {}; wait", pid.display()),
    );
    let call = Call::new("hang").patient(Duration::from_millis(300));
    let error = tools.tools().run(call).await.unwrap_err();
    assert!(
        matches!(&error, CommandError::Late { fate, .. } if *fate == "it was killed"),
        "{error}"
    );
    let pid: i32 = fs::read_to_string(pid).unwrap().trim().parse().unwrap();
    gone(pid).await;
}

/// Waits until a process is no more, or is a zombie that nobody has waited for yet.
async fn gone(pid: i32) {
    for _ in 0..200 {
        match fs::read_to_string(format!("/proc/{pid}/stat")) {
            Err(_) => return,
            Ok(stat) if stat.contains(") Z ") => return,
            Ok(_) => tokio::time::sleep(Duration::from_millis(20)).await,
        }
    }
    panic!("process {pid} still runs");
}

#[tokio::test]
async fn who_gives_up_leaves_nothing_running() {
    let tools = StandIns::new(&[]);
    let pid = tools.path("pid");
    tools.script(
        "hang",
        &format!("echo $$ > {}; exec sleep 1000", pid.display()),
    );
    let with = tools.tools();
    let run = tokio::spawn(async move { with.run(Call::new("hang")).await });
    let read = || fs::read_to_string(&pid).ok()?.trim().parse::<i32>().ok();
    let number = loop {
        if let Some(number) = read() {
            break number;
        }
        tokio::time::sleep(Duration::from_millis(10)).await;
    };
    run.abort();
    assert!(run.await.unwrap_err().is_cancelled());
    gone(number).await;
}

#[tokio::test]
async fn a_daemon_left_behind_does_not_hold_up_its_caller() {
    let tools = StandIns::new(&[]);
    let pid = tools.path("pid");
    tools.script(
        "starter",
        &format!("echo started; sleep 1000 & echo $! > {}", pid.display()),
    );
    let begun = tokio::time::Instant::now();
    let output = tools.tools().succeed(Call::new("starter")).await.unwrap();
    assert_eq!(output.stdout, "started\n");
    assert!(begun.elapsed() < Duration::from_secs(20));
    let pid: i32 = fs::read_to_string(pid).unwrap().trim().parse().unwrap();
    nix::sys::signal::kill(Pid::from_raw(pid), Signal::SIGKILL).unwrap();
}

#[tokio::test]
async fn what_must_not_be_cut_off_goes_on() {
    let tools = StandIns::new(&[]);
    let done = tools.path("done");
    let may = tools.path("may");
    tools.script(
        "mkfs.x",
        &format!(
            "while [ ! -e {} ]; do sleep 0.05; done; echo much; echo > {}",
            may.display(),
            done.display()
        ),
    );
    let with = tools.tools();
    let call = || {
        Call::new("mkfs.x")
            .never_killed()
            .patient(Duration::from_millis(100))
    };
    let error = with.run(call()).await.unwrap_err();
    assert!(error.to_string().ends_with("it goes on"), "{error}");
    let again = with.clone().run(call()).await.unwrap_err();
    assert!(matches!(again, CommandError::StillRuns { .. }), "{again}");
    fs::write(may, "").unwrap();
    for _ in 0..200 {
        if done.exists() && !with.still_runs("mkfs.x") {
            assert_eq!(tools.calls().len(), 1, "not a second one beside it");
            return;
        }
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
    panic!("it was cut off");
}
