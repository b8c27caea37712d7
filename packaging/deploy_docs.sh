#!/usr/bin/env bash
# Publishes the documentation on the branch gh-pages: packaging/deploy_docs.sh BIN VERSION. BIN is a folder with mike. Readers see the last release
# first; the version `dev` shows the main branch.
set -euo pipefail
PATH=$(realpath "$1"):$PATH
version=$2
git config user.name >/dev/null || git config user.name "$(git log -1 --format=%an)"
git config user.email >/dev/null || git config user.email "$(git log -1 --format=%ae)"
git fetch --quiet origin gh-pages:gh-pages || true # there is no such branch before the first time
if [[ $version == dev ]]; then
    mike deploy dev
else
    mike deploy --update-aliases "$version" latest
    mike set-default latest
fi
# Programs look for llms.txt at the root, which has one folder for each version.
folder=$(mktemp --directory)
git worktree add --quiet "$folder" gh-pages
for name in dev latest; do
    if [[ -f $folder/$name/llms.txt ]]; then
        sed "s#](#]($name/#" "$folder/$name/llms.txt" >"$folder/llms.txt"
    fi
done
git -C "$folder" add llms.txt
git -C "$folder" diff --cached --quiet || git -C "$folder" commit --quiet --message "The list of pages at the root"
git worktree remove --force "$folder"
git push --quiet origin gh-pages
